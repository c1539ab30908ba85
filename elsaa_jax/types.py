"""Notation, and the values that pass between the modules.

Axis letters, as in `jax.nn.dot_product_attention`, used by every signature:

  B  batch
  T  queries
  S  keys and values
  N  query heads
  K  key/value heads, N % K == 0; query head n reads key/value head n // G
  G  query heads for each key/value head, G = N // K
  H  head dimension
  L  hash tables of one ensemble of the RACE branch
  P  bits (hyperplanes) of one table
  M  ensembles of the RACE branch
  F  features: M * L * 2**P soft buckets, or the random features of Performer
  C  tokens of a chunk

Masks are boolean, True = attend. A log-mass is the logarithm of the softmax
denominator of one query (or of its estimate), float32.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import jax

Array: TypeAlias = jax.Array
DType: TypeAlias = Any
Implementation: TypeAlias = Literal["xla", "pallas", "interpret"]
Pairing: TypeAlias = Literal["rank", "bucket"]
AttentionKind: TypeAlias = Literal["elsaa", "race", "sort_lsh", "sort_lsh_race", "exact", "performer"]
FusionKind: TypeAlias = Literal["elsaa", "convex", "sum", "lse"]


class BranchOutput(NamedTuple):
    """What one branch says of each query: its output and how much mass it saw.

    Attributes:
      out: (B, T, N, H), the dtype of the query; 0 where a query has no key.
      log_mass: (B, T, N) float32, differentiable; -inf where a query has no key.
    """

    out: Array
    log_mass: Array


class TilePlan(NamedTuple):
    """Which queries attend to which keys, for each level of a causal split (one level otherwise).

    Attributes:
      query_rows: (levels, A, t) int32, rows of the queries of each tile. Within a level a
        query stands in at most one tile.
      key_rows: (levels, C, s) int32, rows of the keys of each block.
      blocks: (levels, A, w) int32, the blocks of each tile; an index past C is no block.
        None: tile a attends to block a, and to that alone.
    """

    query_rows: Array
    key_rows: Array
    blocks: Array | None
