"""Queries and keys in the order of their hash codes, from one sort each."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from elsaa_jax.sparse.call import SparseCall
from elsaa_jax.types import Array

# Rank and position are sorted as one unsigned integer if they fit into it.
PACKED_LIMIT = 2**32


class Slots(NamedTuple):
    """Maps queries to sort slots, (B, X, T * g).

    Tiles hold the queries of all G heads that read one key/value head. In bucket pairing these heads are sorted
    together: X = K and g = G, and query head `i` at position `t` uses slot `t * g + i`. In rank pairing each head is
    sorted by itself: X = N and g = 1.

    Attributes:
      num_queries: T.
      num_heads: N.
      num_kv_heads: K.
      together: Whether the heads that read one key/value head are sorted together.
    """

    num_queries: int
    num_heads: int
    num_kv_heads: int
    together: bool

    @property
    def each(self) -> int:
        """Slots of one position, g."""
        return self.num_heads // self.num_kv_heads if self.together else 1

    def of_queries(self, x: Array) -> Array:
        """Rearranges (B, N, T) to (B, X, T * g)."""
        if not self.together:
            return x
        batch = x.shape[0]
        x = x.reshape(batch, self.num_kv_heads, self.each, self.num_queries)
        return x.swapaxes(2, 3).reshape(batch, self.num_kv_heads, -1)

    def of_mask(self, mask: Array | None) -> Array | None:
        """Repeats a mask (B, T) to (B, T * g)."""
        return mask if mask is None else jnp.repeat(mask, self.each, axis=1)


class Ranks(NamedTuple):
    """Gray ranks of tokens.

    Attributes:
      values: Rank of each token, (B, heads, n). Masked tokens have the largest.
      number: Number of different ranks that may occur.
    """

    values: Array
    number: int


class Sorted(NamedTuple):
    """Queries and keys of a call, sorted by the Gray ranks of their codes; masked tokens come last.

    Attributes:
      slots: Sort slots of the queries.
      slot_mask: Slots that take part, (B, T * g) bool, or None.
      queries: Sort slots in order, (B, X, T * g).
      keys: Key tokens in order, (B, K, S).
      bounds: For each query the number of keys with a smaller rank, and with a rank that is not larger, (B, K, T * g)
        each: by slot in causal attention, in sorted order otherwise. Empty in rank pairing.
    """

    slots: Slots
    slot_mask: Array | None
    queries: Array
    keys: Array
    bounds: tuple[Array, ...]


def sort_both(
    call: SparseCall,
    query_ranks: Array,
    key_ranks: Array,
    num_bits: int,
    query_mask: Array | None,
    key_mask: Array | None,
) -> Sorted:
    """Sorts queries and keys.

    Args:
      call: Static facts.
      query_ranks: Gray ranks of the queries, (B, N, T).
      key_ranks: Gray ranks of the keys, (B, K, S).
      num_bits: Bits of the hash, P.
      query_mask: Queries that take part, (B, T) bool, or None.
      key_mask: Keys that take part, (B, S) bool, or None.
    """
    num_queries, _, num_heads, num_kv_heads = call.facts[:4]
    slots = Slots(num_queries, num_heads, num_kv_heads, call.pairing == "bucket")
    slot_mask = slots.of_mask(query_mask)
    ranks = mask_ranks(slots.of_queries(query_ranks), slot_mask, num_bits)
    queries, sorted_ranks = sort_tokens(ranks)
    keys, key_order = sort_tokens(mask_ranks(key_ranks, key_mask, num_bits))
    bounds: tuple[Array, ...] = ()
    if slots.together:
        bounds = bucket_bounds(key_order, ranks.values if call.facts.is_causal else sorted_ranks)
    return Sorted(slots, slot_mask, queries, keys, bounds)


def mask_ranks(ranks: Array, mask: Array | None, num_bits: int) -> Ranks:
    """Sets the ranks (B, heads, n) of P bits to 2**P where the mask (B, n) is False."""
    if mask is None:
        return Ranks(ranks, 2**num_bits)
    return Ranks(jnp.where(mask[:, None, :], ranks, 2**num_bits), 2**num_bits + 1)


def sort_tokens(ranks: Ranks) -> tuple[Array, Array]:
    """Sorts tokens by rank, then position; returns the token at each place and its rank, (B, heads, n) each."""
    values, length = ranks.values, ranks.values.shape[2]
    token = lax.broadcasted_iota(jnp.int32, values.shape, 2)
    if ranks.number * length <= PACKED_LIMIT:  # One integer sorts several times faster than two.
        packed = lax.sort(values.astype(jnp.uint32) * length + token.astype(jnp.uint32), dimension=2)
        return (packed % length).astype(jnp.int32), (packed // length).astype(jnp.int32)
    values, token = lax.sort((values, token), dimension=2, num_keys=1)
    return token, values


def bucket_bounds(sorted_ranks: Array, ranks: Array) -> tuple[Array, Array]:
    """Counts the sorted ranks (B, K, S) that are below each of `ranks` (B, K, X), and those that are not above."""

    def search(above: bool) -> Array:
        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) // 2
            found = take_along(sorted_ranks, middle)
            right = ((found <= ranks) if above else (found < ranks)) & (low < high)
            return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

        length = sorted_ranks.shape[2]
        bounds = jnp.zeros_like(ranks), jnp.full_like(ranks, length)
        return lax.fori_loop(0, length.bit_length(), halve, bounds)[0]

    return search(False), search(True)


def take_along(x: Array, index: Array) -> Array:
    """Returns x[b, h, index[b, h, i]]; indices past the end are clipped. Axes b and h broadcast."""
    shape = jnp.broadcast_shapes(x.shape[:2], index.shape[:2])
    x, index = (jnp.broadcast_to(a, (*shape, a.shape[2])) for a in (x, index))
    return jnp.take_along_axis(x, index, axis=2, mode="clip")
