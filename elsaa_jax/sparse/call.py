"""Static facts of a call of the sparse branch."""

from __future__ import annotations

from typing import NamedTuple

from elsaa_jax.dispatch import Route
from elsaa_jax.types import CallFacts, Pairing


class SparseCall(NamedTuple):
    """Sizes and rules of one call. Hashable, so it can be a static argument of `jit`.

    Attributes:
      facts: Sizes of the arrays, causality and scale.
      block_size: Keys of a block.
      num_neighbors: Further blocks that a query attends to, on each side of its own.
      pairing: Rule by which queries and blocks are paired; see `sort_lsh.sort_lsh_attention`.
      base: Attention is exact up to this many keys. In the causal form it is N0, the length of a stretch.
      same_mask: Whether queries and keys have the same mask.
      count_keys: Whether to count the keys that each query attends to.
      route: Implementation that runs.
    """

    facts: CallFacts
    block_size: int
    num_neighbors: int
    pairing: Pairing
    base: int
    same_mask: bool
    count_keys: bool
    route: Route
