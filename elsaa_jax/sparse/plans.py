"""The tile plan of a whole call of the sparse branch: one level, or the levels of the causal split."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.sparse.orders import (
    bucket_bounds,
    count_valid,
    mask_ranks,
    seconds_below,
    sort_tokens,
    split_bounds,
    split_windows,
    take_along,
)
from elsaa_jax.sparse.pairing import Level, PlanShape, block_plan, flat_rows, place_by_rank, place_in_bucket, tile_plan
from elsaa_jax.types import Array, Pairing, TilePlan

# Queries of a tile, where tiles are filled by index: small tiles waste little, large ones run faster.
TILE_SIZE = 64


class BlockRule(NamedTuple):
    """How queries and blocks of keys are paired; see `sort_lsh_attention`."""

    block_size: int
    num_neighbors: int
    pairing: Pairing
    same_mask: bool  # the masks of queries and keys are one


class Slots(NamedTuple):
    """Queries as they are sorted: (B, R, T * g), slot t * g + i for query i of g at position t.

    Tiles hold the queries of all heads of a group, G, which read one key/value head. In bucket
    pairing they are sorted together: R = K, g = G. In rank pairing each head is sorted by itself,
    R = N and g = 1, and since its blocks are those of the other heads, they are interleaved later.
    """

    num_queries: int  # T
    num_heads: int  # N
    num_kv_heads: int  # K
    together: bool

    @property
    def each(self) -> int:
        """g, slots of a position."""
        return self.num_heads // self.num_kv_heads if self.together else 1

    @property
    def no_row(self) -> int:
        """How many rows one example has; B times as many is the row that is none."""
        return self.num_queries * self.num_heads

    def of_queries(self, x: Array) -> Array:
        """(B, N, T) -> (B, R, T * g)."""
        if not self.together:
            return x
        batch = x.shape[0]
        x = x.reshape(batch, self.num_kv_heads, self.each, self.num_queries)
        return x.swapaxes(2, 3).reshape(batch, self.num_kv_heads, -1)

    def of_mask(self, mask: Array | None) -> Array | None:
        """(B, T) -> (B, T * g)."""
        return mask if mask is None else jnp.repeat(mask, self.each, axis=1)

    def group(self, slots: Array, valid: Array, blocks: Array) -> tuple[Array, Array]:
        """Slots sorted by block and their blocks, (B, R, Q) -> rows and blocks of a group, (B, K, Q')."""
        batch, _, length = slots.shape
        rows = flat_rows(slots // self.each, self.num_queries) * self.each + slots % self.each
        rows = jnp.where(valid, rows, batch * self.no_row)
        blocks = jnp.broadcast_to(blocks, rows.shape)
        if self.together:
            return rows, blocks
        grouped = (batch, self.num_kv_heads, -1, length)
        rows, blocks = (x.reshape(grouped).swapaxes(2, 3).reshape(*grouped[:2], -1) for x in (rows, blocks))
        return rows, blocks


def full_plan(
    query_ranks: Array,
    key_ranks: Array,
    num_bits: int,
    query_mask: Array | None,
    key_mask: Array | None,
    rule: BlockRule,
) -> TilePlan:
    """Every query may meet every key.

    Args:
      query_ranks: (B, N, T), Gray ranks.
      key_ranks: (B, K, S).
      num_bits: P of the hash.
      query_mask: (B, T) or None.
      key_mask: (B, S) or None.
      rule: how queries and blocks are paired.
    """
    (batch, num_heads, num_queries), (_, num_kv_heads, num_keys) = query_ranks.shape, key_ranks.shape
    slots = Slots(num_queries, num_heads, num_kv_heads, rule.pairing == "bucket")
    max_queries = num_queries * (num_heads // num_kv_heads)
    shape = PlanShape(
        block_size=rule.block_size,
        tile_size=min(TILE_SIZE, max_queries),
        num_neighbors=rule.num_neighbors,
        max_blocks=-(-num_keys // rule.block_size),
        max_queries=max_queries,
    )
    slot_mask = slots.of_mask(query_mask)
    queries, sorted_query_ranks = sort_tokens(mask_ranks(slots.of_queries(query_ranks), slot_mask, num_bits))
    keys, sorted_key_ranks = sort_tokens(mask_ranks(key_ranks, key_mask, num_bits))
    start = jnp.zeros(1, jnp.int32)
    query_counts, key_counts = count_valid(slot_mask, queries, start)[:, None], count_valid(key_mask, keys, start)
    if rule.pairing == "rank" and num_queries == num_keys and rule.same_mask:
        return block_plan(queries, keys, key_counts[:, 0], shape)
    r = jnp.arange(queries.shape[2], dtype=jnp.int32)
    if rule.pairing == "rank":
        place = place_by_rank(r[None, None], query_counts, key_counts[:, None], max(num_queries, num_keys))
    else:
        lo, hi = bucket_bounds(sorted_key_ranks, sorted_query_ranks)
        before = count_valid(query_mask, query_ranks, start, jnp.arange(num_queries, dtype=jnp.int32))[:, None]
        before, number = take_along(before, queries // slots.each), jnp.maximum(query_counts // slots.each, 1)
        fraction = (before.astype(jnp.float32) + 0.5) / number.astype(jnp.float32)
        place = place_in_bucket(lo, hi, fraction, key_counts[:, None])
    rows, blocks = slots.group(queries, r[None, None] < query_counts, place // rule.block_size)
    level = Level(rows, blocks, keys, key_counts, 0, shape.max_blocks)
    return jax.tree.map(lambda x: x[None], tile_plan(level, batch * slots.no_row, shape))


class Descent(NamedTuple):
    """What one level of the causal split hands down to the next: windows of twice its half-length.

    Attributes:
      queries: (B, R, T * g), slots sorted within windows.
      keys: (B, K, S), tokens sorted within windows.
      bounds: lo and hi (B, K, T * g), for each query how many keys of its own window have a smaller
        rank, and how many no greater one; nothing where queries are paired by rank.
    """

    queries: Array
    keys: Array
    bounds: tuple[Array, ...]


def causal_plan(
    query_ranks: Array,
    key_ranks: Array,
    num_bits: int,
    query_mask: Array | None,
    key_mask: Array | None,
    rule: BlockRule,
    base: int,
) -> TilePlan:
    """The levels of the causal split above stretches of `base` tokens; S > base.

    At half-length m the position p belongs to segment p // 2m; it is a key where p // m is even
    and a query where it is odd. The levels follow each other from the longest half, since their
    orders do; all have the same static shapes, so that they are one traced body.
    """
    (batch, num_heads, num_queries), (_, num_kv_heads, num_keys) = query_ranks.shape, key_ranks.shape
    slots = Slots(num_queries, num_heads, num_kv_heads, rule.pairing == "bucket")
    first = num_keys - num_queries
    halves = [base << i for i in reversed(range(((num_keys - 1) // base).bit_length()))]
    segments = [-(-num_keys // (2 * m)) for m in halves]
    num_seconds = [seconds_below(num_keys, m) - seconds_below(first, m) for m in halves]
    max_queries = max(num_seconds) * (num_heads // num_kv_heads)
    shape = PlanShape(
        block_size=rule.block_size,
        tile_size=min(TILE_SIZE, max_queries),
        num_neighbors=rule.num_neighbors,
        max_blocks=max(n * -(-m // rule.block_size) for n, m in zip(segments, halves, strict=True)),
        max_queries=max_queries,
    )
    slot_mask, first_slot = slots.of_mask(query_mask), first * slots.each
    ranks = mask_ranks(slots.of_queries(query_ranks), slot_mask, num_bits)
    position = first + jnp.arange(ranks.values.shape[2], dtype=jnp.int32) // slots.each

    def one_level(above: Descent, half: Array) -> tuple[Descent, TilePlan]:
        half_slots = half * slots.each
        queries, _ = split_windows(above.queries, half_slots, first_slot)
        keys, before = split_windows(above.keys, half, 0)
        blocks_per_segment = (half + rule.block_size - 1) // rule.block_size
        starts = 2 * half * jnp.arange(max(segments), dtype=jnp.int32)
        key_counts = count_valid(key_mask, keys, starts, starts + half)

        # Slot i of all second halves, which lie at the end of their windows.
        index = jnp.arange(max(num_seconds) * slots.each, dtype=jnp.int32) + seconds_below(first_slot, half_slots)
        segment = index // half_slots
        start = (2 * segment + 1) * half_slots - first_slot
        place = start + index % half_slots
        chosen = take_along(queries, place[None, None])
        query_counts = count_valid(slot_mask, queries, start, start + half_slots)[:, None]
        r = (place - jnp.maximum(start, 0))[None, None]

        window, is_second = position // (2 * half), (position // half % 2 == 1)[None, None]
        bounds = [split_bounds(bound, before, window, half) for bound in above.bounds]
        if rule.pairing == "rank":
            num_keys_of = jnp.take(key_counts, segment, axis=1, mode="clip")[:, None]
            key_place = place_by_rank(r, query_counts, num_keys_of, max(num_queries, num_keys))
            block = (segment * blocks_per_segment)[None, None] + key_place // rule.block_size
        else:
            (lo, _), (hi, _) = bounds
            fraction = ((position % half).astype(jnp.float32) + 0.5) / half.astype(jnp.float32)
            num_keys_of = jnp.take(key_counts, window, axis=1, mode="clip")[:, None]
            key_place = place_in_bucket(lo, hi, fraction[None, None], num_keys_of)
            block = take_along((window * blocks_per_segment)[None, None] + key_place // rule.block_size, chosen)
        # Past the last query, the blocks must stay sorted.
        block = jnp.where((place < queries.shape[2])[None, None], block, shape.max_blocks)
        rows, block = slots.group(chosen, r < query_counts, block)
        level = Level(rows, block, keys, key_counts, 2 * half, blocks_per_segment)
        below = tuple(jnp.where(is_second, second_half, first_half) for first_half, second_half in bounds)
        return Descent(queries, keys, below), tile_plan(level, batch * slots.no_row, shape)

    keys, sorted_key_ranks = sort_tokens(mask_ranks(key_ranks, key_mask, num_bits))
    bounds = bucket_bounds(sorted_key_ranks, ranks.values) if rule.pairing == "bucket" else ()
    descent = Descent(sort_tokens(ranks)[0], keys, bounds)
    _, plan = lax.scan(one_level, descent, jnp.asarray(halves, jnp.int32))
    with_queries = [i for i, number in enumerate(num_seconds) if number]
    if len(with_queries) == len(halves):
        return plan
    return jax.tree.map(lambda x: x[jnp.asarray(with_queries)], plan)
