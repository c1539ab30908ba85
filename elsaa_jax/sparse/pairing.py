"""Which query of the sparse branch meets which block of keys: from orders of tokens to a tile plan.

All of it is integers. A level is a set of segments, each a set of keys that queries of the same
segment may see: the whole sequence where attention is not causal; at half-length m of the causal
split, the first half of each window of 2m tokens for the queries of its second half.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.sparse.orders import take_along
from elsaa_jax.types import Array, TilePlan

INT32_MAX = 2**31 - 1


class PlanShape(NamedTuple):
    """The static numbers of a plan.

    Attributes:
      block_size: keys of a block.
      tile_size: queries of a tile.
      num_neighbors: further blocks on each side.
      max_blocks: blocks of a level, at most.
      max_queries: queries of a level that read one key/value head, at most.
    """

    block_size: int
    tile_size: int
    num_neighbors: int
    max_blocks: int
    max_queries: int

    @property
    def max_tiles(self) -> int:
        """Tiles of one key/value head at most: each block in use has at most one that is not full."""
        used = min(self.max_blocks, self.max_queries)
        return (self.max_queries + used * (self.tile_size - 1)) // self.tile_size


class Level(NamedTuple):
    """Queries and keys of one level, both sorted.

    Attributes:
      rows: (B, K, Q), rows of the queries that read one key/value head, sorted by block.
      blocks: (B, K, Q), the block of each query.
      keys: (B, K, S), tokens sorted within segments.
      counts: (B, segments), keys of each segment that are not masked: its first ones.
      stride: places from one segment to the next.
      blocks_per_segment: blocks that hold the keys of a segment.
    """

    rows: Array
    blocks: Array
    keys: Array
    counts: Array
    stride: int | Array
    blocks_per_segment: int | Array


def block_plan(queries: Array, keys: Array, counts: Array, shape: PlanShape) -> TilePlan:
    """Rank pairing where queries and keys are equally many: sorted queries meet sorted keys.

    Alg. 4 of the paper: tile i of the sorted queries attends to block i of the sorted keys.

    Args:
      queries: (B, N, n), sorted tokens.
      keys: (B, K, n), sorted tokens.
      counts: (B,), how many of either are not masked: the first ones.
      shape: of the plan.
    """
    batch, num_kv_heads, length = keys.shape
    size, num_blocks = shape.block_size, shape.max_blocks

    def rows(tokens: Array) -> Array:
        no_row = batch * length * tokens.shape[1]
        valid = jnp.arange(length, dtype=jnp.int32)[None, None, :] < counts[:, None, None]
        rows = jnp.where(valid, flat_rows(tokens, length), no_row)
        return jnp.pad(rows, [(0, 0), (0, 0), (0, num_blocks * size - length)], constant_values=no_row)

    query_rows = rows(queries).reshape(batch, num_kv_heads, -1, num_blocks, size)
    query_rows = query_rows.swapaxes(2, 3).reshape(1, batch * num_kv_heads * num_blocks, -1)
    key_rows = rows(keys).reshape(1, -1, size)
    if not shape.num_neighbors:
        return TilePlan(query_rows, key_rows, None)
    blocks = _neighbors(jnp.arange(num_blocks, dtype=jnp.int32)[None, None], num_blocks, num_blocks, shape)
    blocks = _global_blocks(jnp.broadcast_to(blocks, (batch, num_kv_heads, *blocks.shape[2:])), num_blocks)
    return TilePlan(query_rows, key_rows, blocks[None])


def tile_plan(level: Level, no_row: int, shape: PlanShape) -> TilePlan:
    """One level of any pairing, by tiles of fixed size.

    Each query has its own block; the queries of all heads that read one key/value head are grouped
    by block into tiles, as expert layers group tokens, and a tile attends to its block.

    Args:
      level: who meets whom.
      no_row: the row that is none, of a query.
      shape: of the plan.

    Returns:
      query_rows (B*K*max_tiles, t), key_rows (B*K*max_blocks, s), blocks (B*K*max_tiles, w).
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

    query_rows, tile_blocks = _group(level.blocks, level.rows, no_row, shape)
    tile_blocks = _neighbors(tile_blocks, level.blocks_per_segment, shape.max_blocks, shape)
    return TilePlan(
        query_rows.reshape(-1, shape.tile_size),
        key_rows.reshape(-1, shape.block_size),
        _global_blocks(tile_blocks, shape.max_blocks),
    )


def place_by_rank(r: Array, num_queries: Array, num_keys: Array, bound: int) -> Array:
    """The query of rank r of n_q meets key floor(r * n_k / n_q) (Alg. 4 where the counts are equal).

    Args:
      r: the rank of a query in its segment; beyond n_q where it is masked.
      num_queries: n_q of its segment.
      num_keys: n_k of its segment.
      bound: static, of all of them.
    """
    return floor_ratio(jnp.clip(r, 0, jnp.maximum(num_queries - 1, 0)), num_keys, num_queries, bound)


def place_in_bucket(lo: Array, hi: Array, fraction: Array, num_keys: Array) -> Array:
    """Each query finds its place from its own code and the keys alone: strictly causal.

    Among the n sorted keys its bucket is [lo, hi): min(lo + floor((hi - lo) * fraction), n - 1).
    It grows with code and position, so that queries sorted by these are sorted by their places.
    """
    spread = jnp.floor((hi - lo).astype(jnp.float32) * fraction).astype(jnp.int32)
    return jnp.clip(lo + spread, 0, jnp.maximum(num_keys - 1, 0))


def flat_rows(positions: Array, length: int) -> Array:
    """Positions (B, heads, tokens) -> rows of the flattened (B*length*heads, H)."""
    batch, heads, _ = positions.shape
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    return (b * length + positions) * heads + jnp.arange(heads, dtype=jnp.int32)[None, :, None]


def floor_ratio(r: Array, numerator: Array, denominator: Array, bound: int) -> Array:
    """floor(r * numerator / denominator), exact in int32 for 0 <= r < denominator.

    Args:
      r: at most `bound`, as are the others.
      numerator: of the same shape.
      denominator: of the same shape.
      bound: static; where bound**2 does not fit, the division is done bit by bit.
    """
    denominator = jnp.maximum(denominator, 1)
    if bound * bound <= INT32_MAX:
        return r * numerator // denominator
    whole, part = numerator // denominator, numerator % denominator

    def double(i, state):
        quotient, remainder = state
        bit = (r >> (bound.bit_length() - 1 - i)) & 1
        remainder = 2 * remainder + bit * part
        carry = remainder // denominator
        return 2 * quotient + carry, remainder - carry * denominator

    zeros = jnp.zeros_like(r)
    return r * whole + lax.fori_loop(0, bound.bit_length(), double, (zeros, zeros))[0]


def _group(blocks: Array, rows: Array, no_row: int, shape: PlanShape) -> tuple[Array, Array]:
    """Queries sorted by block, (B, K, Q) -> tiles (B, K, A, t) of rows, and the block (B, K, A) of each."""
    edges = jnp.arange(shape.max_blocks + 1, dtype=jnp.int32)
    tiles = jnp.arange(shape.max_tiles, dtype=jnp.int32)
    size = shape.tile_size

    def one_head(blocks, rows):
        first = jnp.searchsorted(blocks, edges).astype(jnp.int32)
        count = first[1:] - first[:-1]
        num_tiles = (count + size - 1) // size
        ends = jnp.cumsum(num_tiles)
        block = jnp.searchsorted(ends, tiles, side="right").astype(jnp.int32)
        safe = jnp.minimum(block, shape.max_blocks - 1)
        slot = (tiles - ends[safe] + num_tiles[safe])[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None, :]
        valid = (slot < count[safe][:, None]) & (block < shape.max_blocks)[:, None]
        slot = jnp.minimum(slot + first[safe][:, None], rows.shape[0] - 1)
        return jnp.where(valid, rows[slot], no_row), block

    return jax.vmap(jax.vmap(one_head))(blocks, rows)


def _neighbors(blocks: Array, blocks_per_segment: int | Array, no_block: int, shape: PlanShape) -> Array:
    """(B, K, A) -> (B, K, A, w): each block with its neighbours in the same segment."""
    reach = jnp.arange(-shape.num_neighbors, shape.num_neighbors + 1, dtype=jnp.int32)
    near = blocks[..., None] + reach[None, None, None, :]
    same = near // blocks_per_segment == (blocks // blocks_per_segment)[..., None]
    return jnp.where(same, near, no_block)


def _global_blocks(blocks: Array, num_blocks: int) -> Array:
    """Blocks (B, K, A, w) of a head -> blocks (B*K*A, w) among those of all B * K heads."""
    batch, num_kv_heads, _, width = blocks.shape
    head = jnp.arange(batch * num_kv_heads, dtype=jnp.int32).reshape(batch, num_kv_heads, 1, 1)
    total = batch * num_kv_heads * num_blocks
    return jnp.where(blocks < num_blocks, head * num_blocks + blocks, total).reshape(-1, width)
