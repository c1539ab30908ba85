"""Which implementation runs: XLA, or the Pallas kernels of `pallas_kernels`.

`implementation=None` leaves the choice to the library, which takes XLA wherever no kernel
exists. A name is an order: it fails loudly where it cannot be met.
"""

from __future__ import annotations

from elsaa_jax.config import check_choice
from elsaa_jax.types import Implementation

IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas", "interpret")


def check(function: str, implementation: Implementation | None) -> None:
    """Raises ValueError for an implementation of `function` that does not exist.

    Args:
      function: name of a public function, for example "race_attention".
      implementation: what the caller asked for.
    """
    check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    if implementation not in (None, "xla"):
        raise ValueError(
            f"implementation is {implementation!r}, but {function} has no Pallas kernel; it must be None or 'xla'"
        )
