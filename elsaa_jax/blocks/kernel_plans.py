"""Plans as the kernels want them: tiles and blocks of their own sizes, each with a range of the other.

A tile of a `TilePlan` is cut into tiles of `query_tile` rows, a block into blocks of `key_tile` keys. Since tiles
and blocks are sorted, a tile attends to a range of blocks, and a block is attended to by a range of tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from elsaa_jax.arrays.chunks import pad_axis
from elsaa_jax.types import Array, TilePlan
from pallas_kernels.block_attention import Plan
from pallas_kernels.configs import Settings, fit

INT32 = jnp.int32


class Stretch(NamedTuple):
    """Queries of one key/value head at the end of a stretch of keys, which see all of it or their past.

    Attributes:
      num_queries: of each head.
      num_keys: of the stretch.
      group: G, heads that read the keys; queries are ordered by position, then head.
      is_causal: whether a query sees keys up to its own position alone.
    """

    num_queries: int
    num_keys: int
    group: int
    is_causal: bool


def kernel_plan(plan: TilePlan, num_queries: int, num_keys: int, num_rows: int, settings: Settings) -> Plan:
    """The plan of each level, (levels, ...), of tiles that are sorted by block within each key/value head.

    Args:
      plan: of `pairing`.
      num_queries: B*T*N, where the query rows end.
      num_keys: B*S*K, where the key rows end.
      num_rows: B*K.
      settings: of the kernel.
    """
    query_rows, tiles_each = _cut(plan.query_rows, settings.query_tile, num_queries)
    key_rows, blocks_each = _cut(plan.key_rows, settings.key_tile, num_keys)
    levels, num_tiles = plan.query_rows.shape[:2]
    num_blocks = plan.key_rows.shape[1]
    if plan.blocks is None:
        first = jnp.broadcast_to(jnp.arange(num_tiles, dtype=INT32)[None], (levels, num_tiles))
        end, first_tile, end_tile = first + 1, first, first + 1
    else:
        there = plan.blocks < num_blocks
        first = jnp.min(plan.blocks, axis=-1)
        end = jnp.where(there.any(-1), jnp.max(jnp.where(there, plan.blocks, -1), axis=-1) + 1, num_blocks)
        first_tile, end_tile = _tiles_of_blocks(first, end, num_blocks, num_rows)
    used = (query_rows < num_queries).any(-1)
    first, end = (jnp.repeat(x * blocks_each, tiles_each, axis=1) for x in (first, end))
    first_tile, end_tile = (jnp.repeat(x * tiles_each, blocks_each, axis=1) for x in (first_tile, end_tile))
    return Plan(query_rows, key_rows, first, jnp.where(used, end, first), first_tile, end_tile)


def stretch_plan(
    query_rows: Array, key_rows: Array, stretch: Stretch, num_queries: int, num_keys: int, settings: Settings
) -> Plan:
    """The plan of stretches that attend to themselves, one for each row of the arrays.

    Args:
      query_rows: (stretches, num_queries * G), ordered by position, then head.
      key_rows: (stretches, num_keys), ordered by position.
      stretch: what a row holds.
      num_queries: B*T*N, where the query rows end.
      num_keys: B*S*K, where the key rows end.
      settings: of the kernel.
    """
    query_rows, tiles_each = _cut(query_rows[None], settings.query_tile, num_queries)
    key_rows, blocks_each = _cut(key_rows[None], settings.key_tile, num_keys)
    query_rows, key_rows = query_rows[0], key_rows[0]
    query_tile, key_tile = query_rows.shape[1], key_rows.shape[1]
    tile, block = jnp.arange(len(query_rows), dtype=INT32), jnp.arange(len(key_rows), dtype=INT32)
    blocks_seen, tiles_before = jnp.full(tile.shape, blocks_each, INT32), jnp.zeros_like(block)
    if stretch.is_causal:
        before = stretch.num_keys - stretch.num_queries
        last_position = before + ((tile % tiles_each + 1) * query_tile - 1) // stretch.group
        blocks_seen = jnp.minimum(last_position // key_tile + 1, blocks_each)
        first_position = jnp.maximum(block % blocks_each * key_tile - before, 0)
        tiles_before = jnp.minimum(first_position * stretch.group // query_tile, tiles_each)
    first, first_tile = tile // tiles_each * blocks_each, block // blocks_each * tiles_each
    used = (query_rows < num_queries).any(-1)
    end = first + jnp.where(used, blocks_seen, 0)
    return Plan(query_rows, key_rows, first, end, first_tile + tiles_before, first_tile + tiles_each)


def _cut(rows: Array, size: int, no_row: int) -> tuple[Array, int]:
    """(levels, A, t) -> (levels, A * number, size), and the number of pieces of each; padded with `no_row`."""
    size = fit(size, rows.shape[2])
    rows = pad_axis(rows, 2, 0, -rows.shape[2] % size, no_row)
    return rows.reshape(rows.shape[0], -1, size), rows.shape[2] // size


def _tiles_of_blocks(first: Array, end: Array, num_blocks: int, num_rows: int) -> tuple[Array, Array]:
    """Ranges of blocks of each tile (levels, A) -> ranges of tiles of each block (levels, C)."""
    _levels, num_tiles = first.shape
    tiles_each, blocks_each = num_tiles // num_rows, num_blocks // num_rows
    blocks = jnp.arange(num_blocks, dtype=INT32).reshape(num_rows, blocks_each)
    offset = jnp.arange(num_rows, dtype=INT32)[:, None] * tiles_each

    def of_level(first, end):
        def of_row(first, end, blocks):
            return [jnp.searchsorted(x, blocks, side="right").astype(INT32) for x in (end, first)]

        pair = jax.vmap(of_row)(first.reshape(num_rows, -1), end.reshape(num_rows, -1), blocks)
        return tuple((x + offset).reshape(-1) for x in pair)

    return jax.vmap(of_level)(first, end)
