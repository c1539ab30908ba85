"""Notation, vocabulary, and the values that pass between the modules.

Axis letters, as in `jax.nn.dot_product_attention`. Every signature uses them:

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
  F  features: the L * 2**P soft buckets of one ensemble, or the random features of Performer
  C  tokens of a chunk
  R  rows that are independent problems, B * K

Words, each with one meaning:

  block         `block_size` keys that stand together in the sorted order
  bucket        the keys that share one hash code; a soft bucket of RACE is a weighted set of all keys
  causal split  the way in which a causal query reaches its past: its own stretch, then one window of each level
  chunk         C consecutive tokens that RACE or exact attention handles at a time
  level         the windows of one half-length m = N0, 2 N0, 4 N0, ... of the causal split
  log-mass      the logarithm of the softmax denominator of one query (or of its estimate), float32
  N0            the length of a stretch in the causal split, `min_length` or `block_size`
  padding       a row or block index past the end of its array: reads give a fill value, writes are dropped
  place         an index into a sorted order
  segment       the keys of one window that its queries may see, or all keys in non-causal attention
  slot          an index of a query in the order before sorting, with the heads that share keys side by side
  stretch       consecutive tokens within which attention is exact: N0 tokens from a multiple of N0 on, or all tokens
                in exact attention
  tile          queries that attend to the same block or blocks
  window        2m consecutive tokens from a multiple of 2m on; queries of its second half attend to keys of its
                first half

Masks are boolean and True means "attend".
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
LambdaKind: TypeAlias = Literal["fixed", "scalar", "query"]
GateInput: TypeAlias = Literal["input", "query"]
MassScale: TypeAlias = Literal["count", "mean"]


class BranchOutput(NamedTuple):
    """The result of one branch for each query.

    Attributes:
      out: Output, (B, T, N, H), in the dtype of the query; 0 where a query has no key.
      log_mass: Log of the softmax denominator, (B, T, N) float32, differentiable; -inf where a query has no key.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax import exact_attention
      >>> x = jnp.ones((1, 8, 2, 16))
      >>> branch = exact_attention(x, x, x)
      >>> branch.out.shape, branch.log_mass.shape
      ((1, 8, 2, 16), (1, 8, 2))
    """

    out: Array
    log_mass: Array


class CallFacts(NamedTuple):
    """Sizes and settings that all attentions share in one call. Hashable, so it can be a static argument of `jit`.

    Attributes:
      num_queries: T.
      num_keys: S.
      num_heads: N.
      num_kv_heads: K.
      head_dim: H.
      is_causal: Whether query i, at position S - T + i, attends to positions up to its own only.
      scale: Factor of the logits.
    """

    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool
    scale: float


class TilePlan(NamedTuple):
    """The queries and keys that attend to each other, for each level of a causal split (one level otherwise).

    There are A tiles of t queries and D blocks of s keys, and a tile attends to w blocks.

    Attributes:
      query_rows: Row index of each query in a tile, (levels, A, t) int32. Within a level a query is in at most one
        tile.
      key_rows: Row index of each key in a block, (levels, D, s) int32.
      blocks: Blocks that each tile attends to, (levels, A, w) int32; an index past D is padding. None means that
        tile a attends to block a only.
    """

    query_rows: Array
    key_rows: Array
    blocks: Array | None
