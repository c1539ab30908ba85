"""Static facts of a call of block attention."""

from __future__ import annotations

from typing import NamedTuple

from elsaa_jax.blocks.stretches import Stretches
from elsaa_jax.dispatch import Route


class BlockCall(NamedTuple):
    """Static facts of one call. Hashable, so it can be a static argument of `jit`.

    Attributes:
      scale: Factor of the logits.
      stretches: Stretches that attend to themselves, or None if there is only a plan.
      route: Implementation that runs.
    """

    scale: float
    stretches: Stretches | None
    route: Route
