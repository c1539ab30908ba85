"""The plan of non-causal attention: every query may meet every key."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from elsaa_jax.sparse.call import SparseCall
from elsaa_jax.sparse.orders import Sorted, take_along
from elsaa_jax.sparse.pairing import (
    Level,
    PlanShape,
    count_valid,
    flat_rows,
    global_blocks,
    place_by_rank,
    place_in_bucket,
    tile_plan,
    with_neighbors,
)
from elsaa_jax.types import Array, TilePlan


def full_plan(call: SparseCall, tokens: Sorted, query_mask: Array | None, key_mask: Array | None) -> TilePlan:
    """Returns the plan of a call.

    Args:
      call: Static facts.
      tokens: Sorted queries and keys.
      query_mask: Queries that take part, (B, T) bool, or None.
      key_mask: Keys that take part, (B, S) bool, or None.
    """
    num_queries, num_keys, num_heads, num_kv_heads = call.facts[:4]
    slots, slot_mask, queries, keys, bounds = tokens
    max_blocks = -(-num_keys // call.block_size)
    shape = PlanShape(call.block_size, call.num_neighbors, max_blocks, num_queries * (num_heads // num_kv_heads))
    batch, start = len(queries), jnp.zeros(1, jnp.int32)
    query_counts = count_valid(slot_mask, (batch, queries.shape[2]), start)[:, None]
    key_counts = count_valid(key_mask, (batch, num_keys), start)
    if call.pairing == "rank" and num_queries == num_keys and call.same_mask:
        return _equal_plan(queries, keys, key_counts[:, 0], shape)
    r = jnp.arange(queries.shape[2], dtype=jnp.int32)[None, None]
    if call.pairing == "rank":
        place = place_by_rank(r, query_counts, key_counts[:, None])
    else:
        before = count_valid(query_mask, (batch, num_queries), start, jnp.arange(num_queries, dtype=jnp.int32))
        before = take_along(before[:, None], queries // slots.each)
        place = place_in_bucket(*bounds, before, jnp.maximum(query_counts // slots.each, 1), key_counts[:, None])
    level = Level(queries, r < query_counts, place // call.block_size, keys, key_counts, 0, max_blocks)
    return jax.tree.map(lambda x: x[None], tile_plan(level, slots, shape))


def _equal_plan(queries: Array, keys: Array, counts: Array, shape: PlanShape) -> TilePlan:
    """Returns the plan of rank pairing for as many queries as keys: sorted queries meet sorted keys.

    Alg. 4 of the paper: tile i of the sorted queries attends to block i of the sorted keys.

    Args:
      queries: Sorted tokens, (B, N, n).
      keys: Sorted tokens, (B, K, n).
      counts: Tokens that are not masked, (B,); they come first.
      shape: Static sizes.
    """
    batch, num_kv_heads, length = keys.shape
    size, num_blocks = shape.block_size, shape.max_blocks

    def rows(tokens: Array) -> Array:
        padding = batch * length * tokens.shape[1]
        valid = jnp.arange(length, dtype=jnp.int32)[None, None, :] < counts[:, None, None]
        rows = jnp.where(valid, flat_rows(tokens, length), padding)
        return jnp.pad(rows, [(0, 0), (0, 0), (0, num_blocks * size - length)], constant_values=padding)

    query_rows = rows(queries).reshape(batch, num_kv_heads, -1, num_blocks, size)
    query_rows = query_rows.swapaxes(2, 3).reshape(1, batch * num_kv_heads * num_blocks, -1)
    key_rows = rows(keys).reshape(1, -1, size)
    if not shape.num_neighbors:
        return TilePlan(query_rows, key_rows, None)
    blocks = with_neighbors(jnp.arange(num_blocks, dtype=jnp.int32)[None, None], num_blocks, num_blocks, shape)
    blocks = global_blocks(jnp.broadcast_to(blocks, (batch, num_kv_heads, *blocks.shape[2:])), num_blocks)
    return TilePlan(query_rows, key_rows, blocks[None])
