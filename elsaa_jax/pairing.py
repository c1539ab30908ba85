"""Which query of the sparse branch meets which block of keys: from hash codes to a tile plan.

All of it is integers. A level is a set of segments, each a set of keys that queries of the same
segment may see: the whole sequence where attention is not causal; at half-length m of the causal
split, the first half of each stretch of 2m tokens for the queries of its second half.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.tiles import TilePlan
from elsaa_jax.types import Array, Pairing

INT32_MAX = 2**31 - 1


class PlanShape(NamedTuple):
    """The static numbers of a plan.

    Attributes:
      num_bits: P of the hash.
      block_size: keys of a block.
      tile_size: queries of a tile.
      num_neighbors: further blocks on each side.
      pairing: "rank" or "bucket".
      max_segments: segments of a level, at most.
      max_span: keys of all segments of a level together, at most.
      max_blocks: blocks of a level, at most.
      max_queries: queries of a level, at most.
    """

    num_bits: int
    block_size: int
    tile_size: int
    num_neighbors: int
    pairing: Pairing
    max_segments: int
    max_span: int
    max_blocks: int
    max_queries: int

    @property
    def max_tiles(self) -> int:
        """Tiles of one head at most: each block in use has at most one that is not full."""
        used = min(self.max_blocks, self.max_queries)
        return (self.max_queries + used * (self.tile_size - 1)) // self.tile_size


class Tokens(NamedTuple):
    """Tokens of one side of a level.

    Attributes:
      ranks: (B, heads, tokens), Gray ranks of the codes.
      segment: (B, tokens), the segment of each token; `max_segments` where it has none.
      local: (B, tokens), its place in its segment.
      start: position of local 0 in segment 0; segment g begins `Level.stride` * g later.
    """

    ranks: Array
    segment: Array
    local: Array
    start: int | Array


class Level(NamedTuple):
    """Queries and keys of one level, and how its segments lie.

    Attributes:
      query, key: the tokens.
      fraction: (B, T) float32, where a query stands among those of its segment, in (0, 1).
      span: `local` is below it.
      stride: positions from one segment to the next.
      blocks_per_segment: blocks that hold the keys of a segment.
    """

    query: Tokens
    key: Tokens
    fraction: Array
    span: int | Array
    stride: int | Array
    blocks_per_segment: int | Array


class Order(NamedTuple):
    """Tokens sorted by segment, then Gray rank, then place; those without a segment last.

    Attributes:
      segment, rank, local: (B, heads, tokens), of the sorted tokens.
      start, size: (B, max_segments + 1), where each segment lies; the last has no tokens.
    """

    segment: Array
    rank: Array
    local: Array
    start: Array
    size: Array


def block_plan(query: Tokens, key: Tokens, shape: PlanShape) -> TilePlan:
    """Rank pairing where queries and keys are equally many: sorted queries meet sorted keys.

    Alg. 4 of the paper: tile i of the sorted queries attends to block i of the sorted keys.
    """
    batch, _, length = query.ranks.shape
    num_kv_heads = key.ranks.shape[1]
    size = shape.block_size
    num_blocks = -(-length // size)

    def rows(tokens: Tokens) -> Array:
        order = sort_tokens(tokens, length, shape)
        heads = tokens.ranks.shape[1]
        valid = jnp.arange(length, dtype=jnp.int32)[None, None, :] < order.size[:, :1, None]
        rows = jnp.where(valid, flat_rows(order.local, length), batch * length * heads)
        return jnp.pad(rows, [(0, 0), (0, 0), (0, num_blocks * size - length)], constant_values=batch * length * heads)

    query_rows = rows(query).reshape(batch, num_kv_heads, -1, num_blocks, size)
    query_rows = query_rows.swapaxes(2, 3).reshape(1, batch * num_kv_heads * num_blocks, -1)
    key_rows = rows(key).reshape(1, -1, size)
    if not shape.num_neighbors:
        return TilePlan(query_rows, key_rows, None)
    blocks = _neighbors(jnp.arange(num_blocks, dtype=jnp.int32)[None, None], num_blocks, num_blocks, shape)
    blocks = _global_blocks(
        jnp.broadcast_to(blocks, (batch, num_kv_heads, *blocks.shape[2:])), num_kv_heads, num_blocks
    )
    return TilePlan(query_rows, key_rows, blocks[None])


def tile_plan(level: Level, shape: PlanShape) -> TilePlan:
    """One level of any pairing, by tiles of fixed size.

    Each query has its own block; queries are grouped by block into tiles, as expert layers group
    tokens, and a tile attends to its block.

    Returns:
      query_rows (B*N*max_tiles, t), key_rows (B*K*max_blocks, s), blocks (B*N*max_tiles, w).
    """
    batch, num_heads, num_queries = level.query.ranks.shape
    _, num_kv_heads, num_keys = level.key.ranks.shape
    order = sort_tokens(level.key, level.span, shape)

    block = jnp.arange(shape.max_blocks, dtype=jnp.int32)
    segment = jnp.minimum(block // level.blocks_per_segment, shape.max_segments)
    place = (block % level.blocks_per_segment)[:, None] * shape.block_size
    place = place + jnp.arange(shape.block_size, dtype=jnp.int32)[None, :]
    valid = (place[None] < order.size[:, segment, None])[:, None]
    place = (place[None] + order.start[:, segment, None]).reshape(batch, 1, -1)
    sorted_rows = flat_rows(order.segment * level.stride + order.local + level.key.start, num_keys)
    key_rows = _take_along(sorted_rows, place).reshape(batch, num_kv_heads, *valid.shape[2:])
    key_rows = jnp.where(valid, key_rows, batch * num_keys * num_kv_heads)

    pair = _pair_by_rank if shape.pairing == "rank" else _pair_by_bucket
    blocks, positions = pair(level, order, shape)
    rows = flat_rows(positions, num_queries)
    query_rows, tile_blocks = _group(blocks, rows, batch * num_queries * num_heads, shape)
    tile_blocks = _neighbors(tile_blocks, level.blocks_per_segment, shape.max_blocks, shape)
    return TilePlan(
        query_rows.reshape(-1, shape.tile_size),
        key_rows.reshape(-1, shape.block_size),
        _global_blocks(tile_blocks, num_kv_heads, shape.max_blocks),
    )


def sort_tokens(tokens: Tokens, span: int | Array, shape: PlanShape) -> Order:
    """Sorts by (segment, Gray rank, place), packed into one integer where it fits."""
    no_segment = shape.max_segments
    full = tokens.ranks.shape
    segment, local = (jnp.broadcast_to(x[:, None], full) for x in (tokens.segment, tokens.local))
    buckets = 2**shape.num_bits
    if shape.max_span * buckets < INT32_MAX:
        packed = (segment * buckets + tokens.ranks) * span + local
        packed = lax.sort(jnp.where(segment < no_segment, packed, INT32_MAX), dimension=2)
        local, rest = packed % span, packed // span
        segment, rank = jnp.minimum(rest // buckets, no_segment), rest % buckets
    else:
        segment, rank, local = lax.sort((segment, tokens.ranks, local), dimension=2, num_keys=3)
    count = jnp.zeros((full[0], no_segment + 1), jnp.int32)
    count = jax.vmap(lambda c, s: c.at[s].add(1))(count, tokens.segment).at[:, no_segment].set(0)
    return Order(segment, rank, local, jnp.cumsum(count, axis=1) - count, count)


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


def _pair_by_rank(level: Level, keys: Order, shape: PlanShape) -> tuple[Array, Array]:
    """The query of rank r meets key floor(r * n_k / n_q) (Alg. 4 where the counts are equal).

    Returns:
      The queries sorted by block: their blocks and their positions, (B, N, T) each.
    """
    order = sort_tokens(level.query, level.span, shape)
    # Counts do not differ between the heads, so neither does the sequence of segments.
    segment = order.segment[:, 0]

    def of_segment(x):
        return jnp.take_along_axis(x, segment, axis=1)

    r = jnp.arange(segment.shape[1], dtype=jnp.int32)[None, :] - of_segment(order.start)
    num_keys = of_segment(keys.size)
    bound = max(order.local.shape[2], keys.local.shape[2])
    place = floor_ratio(jnp.maximum(r, 0), num_keys, of_segment(order.size), bound)
    block = segment * level.blocks_per_segment + place // shape.block_size
    # A segment without keys keeps its own, empty blocks: the blocks must stay sorted.
    block = jnp.where(of_segment(order.size) > 0, block, shape.max_blocks)
    positions = order.segment * level.stride + order.local + level.query.start
    return jnp.broadcast_to(block[:, None], order.local.shape), positions


def _pair_by_bucket(level: Level, keys: Order, shape: PlanShape) -> tuple[Array, Array]:
    """Each query finds its block from its own code and the keys alone: strictly causal.

    In the n sorted keys its bucket is [lo, hi); place = min(lo + floor((hi - lo) * fraction), n - 1).
    Returns as `_pair_by_rank`.
    """
    query = level.query
    batch, num_heads, num_queries = query.ranks.shape
    num_kv_heads = keys.rank.shape[1]
    grouped = (batch, num_kv_heads, num_heads // num_kv_heads, num_queries)

    def of_heads(x):
        return jnp.broadcast_to(x[:, None, None], grouped).reshape(batch, num_kv_heads, -1)

    def of_segment(x):
        return of_heads(jnp.take_along_axis(x, query.segment, axis=1))

    start, count = of_segment(keys.start), of_segment(keys.size)
    lo, hi = _bucket_bounds(keys.rank, query.ranks.reshape(start.shape), start, count)
    spread = jnp.floor((hi - lo).astype(jnp.float32) * of_heads(level.fraction))
    place = jnp.minimum(lo + spread.astype(jnp.int32), count - 1)
    block = of_heads(query.segment) * level.blocks_per_segment + place // shape.block_size
    block = jnp.where(count > 0, block, shape.max_blocks).reshape(query.ranks.shape)

    position = jnp.broadcast_to(jnp.arange(num_queries, dtype=jnp.int32)[None, None, :], block.shape)
    if (shape.max_blocks + 1) * num_queries < INT32_MAX:
        packed = lax.sort(block * num_queries + position, dimension=2)
        return packed // num_queries, packed % num_queries
    block, position = lax.sort((block, position), dimension=2, num_keys=2)
    return block, position


def _bucket_bounds(sorted_ranks: Array, ranks: Array, start: Array, count: Array) -> tuple[Array, Array]:
    """First place in [start, start + count) with a rank >= `ranks`, and with one above; from start."""

    def search(above):
        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) // 2
            found = _take_along(sorted_ranks, middle)
            right = (found <= ranks) if above else (found < ranks)
            right = right & (low < high)
            return jnp.where(right, middle + 1, low), jnp.where(right, high, jnp.where(low < high, middle, high))

        steps = sorted_ranks.shape[-1].bit_length()
        return lax.fori_loop(0, steps, halve, (start, start + count))[0] - start

    return search(False), search(True)


def _take_along(x: Array, index: Array) -> Array:
    """x[b, k, index[b, k, i]], index past the end clipped; `index` may have one head for all."""
    index = jnp.broadcast_to(index, (*x.shape[:2], index.shape[2]))
    return jnp.take_along_axis(x, index, axis=2, mode="clip")


def _group(blocks: Array, rows: Array, no_row: int, shape: PlanShape) -> tuple[Array, Array]:
    """Queries sorted by block, (B, N, T) -> tiles (B, N, A, t) of rows, and the block (B, N, A) of each."""
    blocks, rows = (x[..., : shape.max_queries] for x in (blocks, rows))
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
    """(B, N, A) -> (B, N, A, w): each block with its neighbours in the same segment."""
    reach = jnp.arange(-shape.num_neighbors, shape.num_neighbors + 1, dtype=jnp.int32)
    near = blocks[..., None] + reach[None, None, None, :]
    same = near // blocks_per_segment == (blocks // blocks_per_segment)[..., None]
    return jnp.where(same, near, no_block)


def _global_blocks(blocks: Array, num_kv_heads: int, num_blocks: int) -> Array:
    """Blocks (B, N, A, w) of a head -> blocks (B*N*A, w) among those of all B * K heads."""
    batch, num_heads, _, width = blocks.shape
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    k = jnp.arange(num_heads, dtype=jnp.int32)[None, :, None, None] // (num_heads // num_kv_heads)
    total = batch * num_kv_heads * num_blocks
    return jnp.where(blocks < num_blocks, (b * num_kv_heads + k) * num_blocks + blocks, total).reshape(-1, width)
