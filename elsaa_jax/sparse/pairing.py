"""Pairs sorted queries with blocks of sorted keys, and groups them into the tiles of a plan.

All numbers are integers. A level is a set of segments. Each segment is a set of keys that its queries may see: the
whole sequence in non-causal attention; at half-length m of the causal split, the first half of a window of 2m tokens,
seen by the queries of its second half.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from elsaa_jax.sparse.orders import Slots, take_along
from elsaa_jax.types import Array, TilePlan

# Queries of a tile: small tiles waste little, large ones run faster.
TILE_SIZE = 64


class PlanShape(NamedTuple):
    """Static sizes of a plan.

    Attributes:
      block_size: Keys of a block.
      num_neighbors: Further blocks on each side of a query's own.
      max_blocks: Largest number of blocks of a level.
      max_queries: Largest number of queries of a level that read one key/value head.
    """

    block_size: int
    num_neighbors: int
    max_blocks: int
    max_queries: int

    @property
    def tile_size(self) -> int:
        """Queries of a tile."""
        return min(TILE_SIZE, self.max_queries)

    @property
    def max_tiles(self) -> int:
        """Largest number of tiles of one key/value head: each block in use has at most one that is not full."""
        used = min(self.max_blocks, self.max_queries)
        return (self.max_queries + used * (self.tile_size - 1)) // self.tile_size


class Level(NamedTuple):
    """Queries and keys of one level, both sorted.

    Attributes:
      queries: Sort slots of the queries in the order of their blocks, (B, X, Q).
      valid: Whether each of them takes part; broadcasts to (B, X, Q).
      blocks: Block of each query; broadcasts to (B, X, Q).
      keys: Tokens sorted within segments, (B, K, S).
      counts: Keys of each segment that are not masked, (B, segments). They come first in their segment.
      stride: Places from one segment to the next.
      blocks_per_segment: Blocks that hold the keys of a segment.
    """

    queries: Array
    valid: Array
    blocks: Array
    keys: Array
    counts: Array
    stride: int | Array
    blocks_per_segment: int | Array


def tile_plan(level: Level, slots: Slots, shape: PlanShape) -> TilePlan:
    """Returns the plan of one level, for any pairing.

    Each query has its own block. The queries of all heads that read one key/value head are grouped by block into
    tiles of fixed size, as expert layers group tokens, and a tile attends to its block.

    Args:
      level: Queries with their blocks, and keys.
      slots: Sort slots of the queries.
      shape: Static sizes.

    Returns:
      query_rows (B*K*max_tiles, t), key_rows (B*K*max_blocks, s) and blocks (B*K*max_tiles, w).
    """
    batch, num_kv_heads, num_keys = level.keys.shape
    block = jnp.arange(shape.max_blocks, dtype=jnp.int32)
    segment, block = block // level.blocks_per_segment, block % level.blocks_per_segment
    counts = jnp.where(segment < level.counts.shape[1], level.counts[:, segment], 0)
    place = block[:, None] * shape.block_size + jnp.arange(shape.block_size, dtype=jnp.int32)[None, :]
    valid = (place[None] < counts[:, :, None])[:, None]
    place = (place + (segment * level.stride)[:, None]).reshape(1, 1, -1)
    key_rows = flat_rows(take_along(level.keys, place), num_keys).reshape(batch, num_kv_heads, *valid.shape[2:])
    key_rows = jnp.where(valid, key_rows, batch * num_keys * num_kv_heads)

    query_rows, tile_blocks = _group(level, slots, shape)
    tile_blocks = with_neighbors(tile_blocks, level.blocks_per_segment, shape.max_blocks, shape)
    return TilePlan(
        query_rows.reshape(-1, shape.tile_size),
        key_rows.reshape(-1, shape.block_size),
        global_blocks(tile_blocks, shape.max_blocks),
    )


def count_valid(mask: Array | None, shape: tuple[int, int], start: Array, end: Array | None = None) -> Array:
    """Counts the tokens in [start, end) that are not masked, (B, X).

    Args:
      mask: Tokens that take part, (B, n) bool, or None.
      shape: Batch size and number of tokens, (B, n).
      start: First positions, (X,).
      end: Positions after the last ones, (X,); n by default.
    """
    batch, length = shape
    start, end = jnp.clip(start, 0, length), jnp.full_like(start, length) if end is None else jnp.clip(end, 0, length)
    if mask is None:
        return jnp.broadcast_to(end - start, (batch, *jnp.broadcast_shapes(end.shape, start.shape)))
    before = jnp.pad(jnp.cumsum(mask, axis=1, dtype=jnp.int32), [(0, 0), (1, 0)])
    return before[:, end] - before[:, start]


def place_by_rank(r: Array, num_queries: Array, num_keys: Array) -> Array:
    """Returns the key that the query of rank r of n_q meets, floor(r * n_k / n_q) (Alg. 4 for equal counts).

    Args:
      r: Rank of a query in its segment; n_q or more for a masked query.
      num_queries: Queries of its segment, n_q.
      num_keys: Keys of its segment, n_k.
    """
    return floor_ratio(jnp.clip(r, 0, jnp.maximum(num_queries - 1, 0)), num_keys, jnp.maximum(num_queries, 1))


def place_in_bucket(lo: Array, hi: Array, index: Array, length: Array, num_keys: Array) -> Array:
    """Returns the key that a query meets, from its own code and the keys only: strictly causal.

    The place is min(lo + floor((hi - lo) * (2 i + 1) / (2 m)), n - 1). It grows with code and position, so queries
    sorted by these are sorted by their places.

    Args:
      lo: First key of the query's bucket among the n sorted keys.
      hi: First key after the bucket.
      index: Position i of the query among the m that share the keys.
      length: m.
      num_keys: n.
    """
    spread = floor_ratio(2 * index + 1, hi - lo, 2 * length)
    return jnp.clip(lo + spread, 0, jnp.maximum(num_keys - 1, 0))


def floor_ratio(r: Array, numerator: Array, denominator: Array) -> Array:
    """Returns floor(r * numerator / denominator), exact for 0 <= r < denominator <= 2**25 and numerator <= 2**24.

    A float32 quotient is off by a few units at most. The remainder that it leaves is small, so int32 arithmetic gives
    it exactly although the products overflow, and the remainder corrects the quotient.
    """
    product = r.astype(jnp.float32) * numerator.astype(jnp.float32)
    estimate = (product / denominator.astype(jnp.float32)).astype(jnp.int32)
    return estimate + (r * numerator - estimate * denominator) // denominator


def flat_rows(positions: Array, length: int) -> Array:
    """Turns positions (B, heads, tokens) into rows of the flattened array (B*length*heads, H)."""
    batch, heads, _ = positions.shape
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    return (b * length + positions) * heads + jnp.arange(heads, dtype=jnp.int32)[None, :, None]


def _group(level: Level, slots: Slots, shape: PlanShape) -> tuple[Array, Array]:
    """Groups queries that are sorted by block into tiles (B, K, A, t) of rows; also returns the block of each tile."""
    batch, _, length = level.queries.shape
    padding, size = batch * slots.num_queries * slots.num_heads, shape.tile_size
    rows = flat_rows(level.queries // slots.each, slots.num_queries) * slots.each + level.queries % slots.each
    rows = jnp.where(level.valid, rows, padding)
    blocks = jnp.broadcast_to(level.blocks, rows.shape)
    if not slots.together:  # The heads of a group are interleaved: their blocks are the same.
        grouped = (batch, slots.num_kv_heads, -1, length)
        rows, blocks = (x.reshape(grouped).swapaxes(2, 3).reshape(*grouped[:2], -1) for x in (rows, blocks))
    edges = jnp.arange(shape.max_blocks + 1, dtype=jnp.int32)
    tiles = jnp.arange(shape.max_tiles, dtype=jnp.int32)

    def one_head(blocks: Array, rows: Array) -> tuple[Array, Array]:
        first = jnp.searchsorted(blocks, edges).astype(jnp.int32)
        count = first[1:] - first[:-1]
        num_tiles = (count + size - 1) // size
        ends = jnp.cumsum(num_tiles)
        block = jnp.searchsorted(ends, tiles, side="right").astype(jnp.int32)
        safe = jnp.minimum(block, shape.max_blocks - 1)
        slot = (tiles - ends[safe] + num_tiles[safe])[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None, :]
        valid = (slot < count[safe][:, None]) & (block < shape.max_blocks)[:, None]
        slot = jnp.minimum(slot + first[safe][:, None], rows.shape[0] - 1)
        return jnp.where(valid, rows[slot], padding), block

    return jax.vmap(jax.vmap(one_head))(blocks, rows)


def with_neighbors(blocks: Array, blocks_per_segment: int | Array, padding: int, shape: PlanShape) -> Array:
    """Adds to each block (B, K, A) its neighbours in the same segment: (B, K, A, w)."""
    reach = jnp.arange(-shape.num_neighbors, shape.num_neighbors + 1, dtype=jnp.int32)
    near = blocks[..., None] + reach[None, None, None, :]
    same = near // blocks_per_segment == (blocks // blocks_per_segment)[..., None]
    return jnp.where(same, near, padding)


def global_blocks(blocks: Array, num_blocks: int) -> Array:
    """Renumbers the blocks (B, K, A, w) of each head among the blocks of all B * K heads: (B*K*A, w)."""
    batch, num_kv_heads, _, width = blocks.shape
    head = jnp.arange(batch * num_kv_heads, dtype=jnp.int32).reshape(batch, num_kv_heads, 1, 1)
    total = batch * num_kv_heads * num_blocks
    return jnp.where(blocks < num_blocks, head * num_blocks + blocks, total).reshape(-1, width)
