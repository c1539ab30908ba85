"""Plans in the form of the kernels: tiles and blocks of the kernel's own sizes, each with a range of the other.

Each tile of a `TilePlan` is cut into tiles of `query_tile` rows and each block into blocks of `key_tile` keys. Tiles
and blocks are sorted, so a tile attends to a range of blocks, and a range of tiles attends to a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from elsaa_jax.arrays.chunks import pad_axis
from elsaa_jax.blocks.call import BlockCall
from elsaa_jax.types import Array, TilePlan
from pallas_kernels.block_attention import Causal, Geometry, Plan
from pallas_kernels.configs import Settings, fit

INT32 = jnp.int32


def level_plans(plan: TilePlan, query: Array, key: Array, settings: Settings) -> Plan:
    """Cuts a plan into the kernel's tiles and blocks.

    Args:
      plan: Tiles and blocks that attend to each other, sorted by block within each key/value head.
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      settings: Settings of the kernel.

    Returns:
      The plans of all levels, (levels, ...).
    """
    num_queries, num_keys = query.size // query.shape[-1], key.size // key.shape[-1]
    num_rows = key.shape[0] * key.shape[2]
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
    call: BlockCall, query: Array, key: Array, key_mask: Array | None, settings: Settings
) -> tuple[Plan, Geometry]:
    """Returns the plan of the stretches of `call`, which attend to themselves, and the geometry of its kernel."""
    stretches = call.stretches
    assert stretches is not None
    (batch, num_queries, num_heads, _), (_, num_keys, num_kv_heads, _) = query.shape, key.shape
    queries_each, keys_each, group = stretches.queries_each, stretches.keys_each, num_heads // num_kv_heads
    padding_query, padding_key = query.size // query.shape[-1], key.size // key.shape[-1]
    query_rows = jnp.arange(padding_query, dtype=INT32).reshape(batch, num_queries, num_kv_heads, group)
    query_rows = jnp.moveaxis(stretches.split(query_rows, "queries", padding_query), 2, 1)
    key_rows = jnp.arange(padding_key, dtype=INT32).reshape(batch, num_keys, num_kv_heads)
    if key_mask is not None:
        key_rows = jnp.where(key_mask[:, :, None], key_rows, padding_key)
    key_rows = stretches.split(key_rows, "keys", padding_key).swapaxes(1, 2)
    # Queries of a stretch are ordered by position, then head.
    query_rows = query_rows.reshape(1, -1, queries_each * group)
    key_rows = key_rows.reshape(1, -1, keys_each)

    (query_rows,), tiles_each = _cut(query_rows, settings.query_tile, padding_query)
    (key_rows,), blocks_each = _cut(key_rows, settings.key_tile, padding_key)
    query_tile, key_tile = query_rows.shape[1], key_rows.shape[1]
    tile, block = jnp.arange(len(query_rows), dtype=INT32), jnp.arange(len(key_rows), dtype=INT32)
    blocks_seen, tiles_before = jnp.full(tile.shape, blocks_each, INT32), jnp.zeros_like(block)
    causal = None
    if stretches.is_causal:
        causal = Causal(num_queries, num_keys, num_heads, num_kv_heads)
        before = keys_each - queries_each
        last_position = before + ((tile % tiles_each + 1) * query_tile - 1) // group
        blocks_seen = jnp.minimum(last_position // key_tile + 1, blocks_each)
        first_position = jnp.maximum(block % blocks_each * key_tile - before, 0)
        tiles_before = jnp.minimum(first_position * group // query_tile, tiles_each)
    first, first_tile = tile // tiles_each * blocks_each, block // blocks_each * tiles_each
    used = (query_rows < padding_query).any(-1)
    end = first + jnp.where(used, blocks_seen, 0)
    plan = Plan(query_rows, key_rows, first, end, first_tile + tiles_before, first_tile + tiles_each)
    return plan, Geometry(call.scale, causal)


def _cut(rows: Array, size: int, padding: int) -> tuple[Array, int]:
    """Cuts (levels, A, t) into (levels, A * number, size), padded with `padding`; also returns `number`."""
    size = fit(size, rows.shape[2])
    rows = pad_axis(rows, 2, 0, -rows.shape[2] % size, padding)
    return rows.reshape(rows.shape[0], -1, size), rows.shape[2] // size


def _tiles_of_blocks(first: Array, end: Array, num_blocks: int, num_rows: int) -> tuple[Array, Array]:
    """Turns the range of blocks of each tile, (levels, A), into the range of tiles of each block, (levels, D)."""
    _levels, num_tiles = first.shape
    tiles_each, blocks_each = num_tiles // num_rows, num_blocks // num_rows
    blocks = jnp.arange(num_blocks, dtype=INT32).reshape(num_rows, blocks_each)
    offset = jnp.arange(num_rows, dtype=INT32)[:, None] * tiles_each

    def of_level(first: Array, end: Array) -> tuple[Array, ...]:
        def of_row(first: Array, end: Array, blocks: Array) -> list[Array]:
            return [jnp.searchsorted(x, blocks, side="right").astype(INT32) for x in (end, first)]

        pair = jax.vmap(of_row)(first.reshape(num_rows, -1), end.reshape(num_rows, -1), blocks)
        return tuple((x + offset).reshape(-1) for x in pair)

    first_tile, end_tile = jax.vmap(of_level)(first, end)
    return first_tile, end_tile
