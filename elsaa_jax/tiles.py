"""Attention of tiles of queries to blocks of keys, both named by index.

The hot loop of the sparse branch. A plan says, in integers, which rows of the flattened query
(B*T*N, H) form a tile, which rows of the flattened key (B*S*K, H) form a block, and which blocks
a tile attends to. Rows are gathered tile by tile and results go back through the same index, so
no sorted copy of q, k, v or out exists, and no more than a few tiles of scores at a time.

An index past the end of the rows is no row: it pads tiles and blocks, and stands for masked tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from elsaa_jax import blocks
from elsaa_jax.masses import mix, softmax_pair
from elsaa_jax.types import Array, TilePlan

# Scores that are computed at a time.
SCORES_AT_A_TIME = 2**20


def forward(
    plan: TilePlan, scale: float, query: Array, key: Array, value: Array, start: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """out (B*T*N, H) and log_mass (B*T*N), float32, merged over the levels.

    Args:
      plan: who attends to whom.
      scale: factor of the logits.
      query: (B*T*N, H).
      key: (B*S*K, H).
      value: (B*S*K, H).
      start: out and log_mass of keys that are no part of the plan, merged in.
    """
    single = start is None and plan.query_rows.shape[0] == 1
    if start is None:
        start = (jnp.zeros(query.shape, jnp.float32), jnp.full(query.shape[:1], -jnp.inf, jnp.float32))

    def attend(query_rows, key_rows):
        return blocks.forward(_take(query, query_rows), *_take_keys(key, value, key_rows), scale)

    def nothing(query_rows, key_rows):
        return jnp.zeros((*query_rows.shape, query.shape[1]), jnp.float32), jnp.full(
            query_rows.shape, -jnp.inf, jnp.float32
        )

    def step(state, query_rows, key_rows):
        out, log_mass = _unless_empty(plan, len(query), attend, nothing, query_rows, key_rows)
        if not single:
            weights, log_mass = softmax_pair(_take(state[1], query_rows, -jnp.inf), log_mass)
            out = mix(_take(state[0], query_rows), out, weights)
        return _put(state[0], query_rows, out), _put(state[1], query_rows, log_mass)

    return _loop(plan, len(query), len(key), step, start)


def backward(
    plan: TilePlan,
    scale: float,
    query: Array,
    key: Array,
    value: Array,
    log_mass: Array,
    d_out: Array,
    shift: Array,
    start: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """d_query, d_key and d_value, float32, added to `start`; see `blocks.backward`."""
    # exp(logit - inf) is 0: a row that is no row has no weights.
    log_mass = jnp.where(jnp.isneginf(log_mass), jnp.inf, log_mass)

    def derive(query_rows, key_rows):
        keys = _take_keys(key, value, key_rows)
        rows = (_take(x, query_rows, fill) for x, fill in ((log_mass, jnp.inf), (d_out, 0), (shift, 0)))
        return blocks.backward(_take(query, query_rows), *keys, scale, *rows)

    def nothing(query_rows, key_rows):
        d_key = jnp.zeros((*key_rows.shape, key.shape[1]), jnp.float32)
        return jnp.zeros((*query_rows.shape, query.shape[1]), jnp.float32), d_key, d_key

    def step(state, query_rows, key_rows):
        d_query, d_key, d_value = _unless_empty(plan, len(query), derive, nothing, query_rows, key_rows)
        return (
            state[0].at[query_rows].add(d_query, mode="drop"),
            state[1].at[key_rows].add(d_key, mode="drop"),
            state[2].at[key_rows].add(d_value, mode="drop"),
        )

    return _loop(plan, len(query), len(key), step, start)


def count_keys(plan: TilePlan, num_queries: int, num_keys: int) -> Array:
    """How many keys each query attends to by the plan: (B*T*N) float32."""

    def step(size, query_rows, key_rows):
        keys = jnp.sum(key_rows < num_keys, axis=-1, dtype=jnp.float32)
        return size.at[query_rows].add(jnp.broadcast_to(keys[:, None], query_rows.shape), mode="drop")

    return _loop(plan, num_queries, num_keys, step, jnp.zeros((num_queries,), jnp.float32))


def _take(rows: Array, index: Array, fill: float = 0) -> Array:
    return rows.at[index].get(mode="fill", fill_value=fill)


def _take_keys(key: Array, value: Array, index: Array) -> tuple[Array, Array, Array]:
    """Keys and values of blocks, and what is added to their logits."""
    return _take(key, index), _take(value, index), jnp.where(index < len(key), 0.0, -jnp.inf)[:, None, :]


def _put(rows: Array, index: Array, values: Array) -> Array:
    return rows.at[index].set(values, mode="drop", unique_indices=True)


def _unless_empty(plan: TilePlan, num_queries: int, function, otherwise, query_rows: Array, key_rows: Array):
    """Skips tiles without queries: a plan with `blocks` has as many tiles as could be needed."""
    if plan.blocks is None:
        return function(query_rows, key_rows)
    return lax.cond(jnp.any(query_rows < num_queries), function, otherwise, query_rows, key_rows)


def _loop(plan: TilePlan, num_queries: int, num_keys: int, step, state):
    """Runs `step(state, query_rows (a, t), key_rows (a, w*s))` over all tiles, a few at a time."""
    levels, num_tiles, tile = plan.query_rows.shape
    _, num_blocks, block = plan.key_rows.shape
    width = 1 if plan.blocks is None else plan.blocks.shape[-1]
    at_a_time = min(num_tiles, max(1, SCORES_AT_A_TIME // (tile * width * block)))

    def group(x, fill):
        """(levels, A, ...) -> (levels, A / a, a, ...), padded with `fill`."""
        extra = -x.shape[1] % at_a_time
        x = jnp.pad(x, [(0, 0), (0, extra), (0, 0)], constant_values=fill)
        return x.reshape(levels, -1, at_a_time, x.shape[-1])

    def tiles(state, xs):
        query_rows, key_rows = xs
        return step(state, query_rows, key_rows), None

    def level(state, xs):
        query_rows, key_rows, blocks = xs
        if blocks is None:
            return lax.scan(tiles, state, (query_rows, key_rows))

        def named_tiles(state, xs):
            query_rows, blocks = xs
            keys = _take(key_rows, blocks, num_keys).reshape(at_a_time, width * block)
            return tiles(state, (query_rows, keys))

        return lax.scan(named_tiles, state, (query_rows, blocks))

    query_rows = group(plan.query_rows, num_queries)
    if plan.blocks is None:
        return lax.scan(level, state, (query_rows, group(plan.key_rows, num_keys), None))[0]
    return lax.scan(level, state, (query_rows, plan.key_rows, group(plan.blocks, num_blocks)))[0]
