"""Attention of tiles of queries to blocks of keys, both given by row index, in XLA.

This is the hot loop of the sparse branch. The integers of a plan say which rows of the flattened query `(B*T*N, H)`
form a tile, which rows of the flattened key `(B*S*K, H)` form a block, and which blocks a tile attends to. Rows are
gathered tile by tile and results go back through the same index. So no sorted copy of q, k, v or out exists, and only
a few tiles of scores exist at a time.

An index past the end of the rows is padding. It fills up tiles and blocks, and stands for masked tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from elsaa_jax.arrays.chunks import equal_size
from elsaa_jax.arrays.masses import mix, softmax_pair
from elsaa_jax.blocks import one_block as blocks
from elsaa_jax.types import Array, TilePlan

# Number of scores that are computed at a time.
SCORES_AT_A_TIME = 2**21


def interleave(plan: TilePlan, num_rows: int) -> TilePlan:
    """Reorders the tiles so that those of all B * K heads take turns, and tiles of one window stand near each other.

    The rows that they gather lie close in memory, and tiles without queries stand at the end.
    """

    def mix_rows(x: Array) -> Array:
        return x.reshape(len(x), num_rows, -1, x.shape[2]).swapaxes(1, 2).reshape(x.shape)

    if plan.blocks is None:
        return plan
    return plan._replace(query_rows=mix_rows(plan.query_rows), blocks=mix_rows(plan.blocks))


def forward(
    plan: TilePlan, scale: float, query: Array, key: Array, value: Array, start: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """Computes the output (B*T*N, H) and the log-mass (B*T*N), float32, merged over the levels.

    Args:
      plan: Tiles and blocks that attend to each other.
      scale: Factor of the logits.
      query: Rows of queries, (B*T*N, H).
      key: Rows of keys, (B*S*K, H).
      value: Rows of values, (B*S*K, H).
      start: Output and log-mass over keys outside of the plan, which are merged in; or None.
    """
    single = start is None and plan.query_rows.shape[0] == 1
    if start is None:
        start = (jnp.zeros(query.shape, jnp.float32), jnp.full(query.shape[:1], -jnp.inf, jnp.float32))

    def attend(query_rows: Array, key_rows: Array) -> tuple[Array, Array]:
        key_of, value_of = _take_rows(key, key_rows), _take_rows(value, key_rows)
        return blocks.forward(_take_rows(query, query_rows), key_of, value_of, _bias(key_rows, len(key)), scale)

    def nothing(query_rows: Array, key_rows: Array) -> tuple[Array, Array]:
        return jnp.zeros((*query_rows.shape, query.shape[1]), jnp.float32), jnp.full(
            query_rows.shape, -jnp.inf, jnp.float32
        )

    def step(state: tuple[Array, Array], query_rows: Array, key_rows: Array) -> tuple[Array, Array]:
        out, log_mass = _unless_empty(plan, len(query), attend, nothing, query_rows, key_rows)
        if not single:
            weights, log_mass = softmax_pair(_take(state[1], query_rows, -jnp.inf), log_mass)
            out = mix(_take(state[0], query_rows), out, weights)
        log_mass = state[1].at[query_rows].set(log_mass, mode="drop", unique_indices=True)
        return _scatter(lax.scatter, state[0], query_rows, out), log_mass

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
    """Adds d_query, d_key and d_value to `start`, float32; `one_block.backward` explains `log_mass` and `shift`.

    `log_mass` is +inf for a query without keys: exp(logit - inf) is 0, so it has no weights, and neither has padding.
    """

    def derive(query_rows: Array, key_rows: Array) -> tuple[Array, Array, Array]:
        query_of, d_out_of = _take_rows(query, query_rows), _take_rows(d_out, query_rows)
        key_of, value_of = _take_rows(key, key_rows), _take_rows(value, key_rows)
        numbers = _take(log_mass, query_rows, jnp.inf), d_out_of, _take(shift, query_rows)
        return blocks.backward(query_of, key_of, value_of, _bias(key_rows, len(key)), scale, *numbers)

    def nothing(query_rows: Array, key_rows: Array) -> tuple[Array, Array, Array]:
        d_key = jnp.zeros((*key_rows.shape, key.shape[1]), jnp.float32)
        return jnp.zeros((*query_rows.shape, query.shape[1]), jnp.float32), d_key, d_key

    def step(state: tuple[Array, ...], query_rows: Array, key_rows: Array) -> tuple[Array, ...]:
        derivatives = _unless_empty(plan, len(query), derive, nothing, query_rows, key_rows)
        index = query_rows, key_rows, key_rows
        return tuple(_scatter(lax.scatter_add, *x) for x in zip(state, index, derivatives, strict=True))

    return _loop(plan, len(query), len(key), step, start)


def count_keys(plan: TilePlan, num_queries: int, num_keys: int) -> Array:
    """Counts the keys that each query attends to by the plan, (B*T*N) float32."""

    def step(size: Array, query_rows: Array, key_rows: Array) -> Array:
        keys = jnp.sum(key_rows < num_keys, axis=-1, dtype=jnp.float32)
        return size.at[query_rows].add(jnp.broadcast_to(keys[:, None], query_rows.shape), mode="drop")

    return _loop(plan, num_queries, num_keys, step, jnp.zeros((num_queries,), jnp.float32))


def _take(rows: Array, index: Array, fill: float = 0) -> Array:
    return rows.at[index].get(mode="fill", fill_value=fill)


def _take_rows(rows: Array, index: Array) -> Array:
    """Gathers rows (..., H), 0 for padding, in a form that LLVM compiles to vector instructions.

    A plain gather copies a row of 64 numbers one by one and waits for memory at each row. With integer arithmetic
    besides the copy, LLVM uses vectors and is up to three times faster. XLA would move arithmetic on floats elsewhere.
    """
    integer = jnp.dtype(f"int{8 * rows.dtype.itemsize}")
    bits = lax.bitcast_convert_type(rows.at[index].get(mode="clip"), integer)
    keep, zero = jnp.where(index < len(rows), -1, 0), index >> 31
    bits = (bits & keep.astype(integer)[..., None]) ^ zero.astype(integer)[..., None]
    return lax.bitcast_convert_type(bits, rows.dtype)


def _bias(key_rows: Array, num_keys: int) -> Array:
    """Returns the mask that is added to the logits of blocks: -inf for padding."""
    return jnp.where(key_rows < num_keys, 0.0, -jnp.inf)[:, None, :]


def _scatter(update: Callable[..., Array], rows: Array, index: Array, values: Array) -> Array:
    """Writes or adds rows of `values` (a, t, H) to `rows` (X, H), in shapes that XLA scatters without a copy."""
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0,))
    values = values.reshape(-1, 1, values.shape[-1])
    return update(rows, index.reshape(-1, 1), values, numbers, mode="drop")


def _unless_empty(
    plan: TilePlan,
    num_queries: int,
    function: Callable[..., Any],
    otherwise: Callable[..., Any],
    query_rows: Array,
    key_rows: Array,
) -> Any:
    """Skips tiles without queries: a plan with `blocks` has as many tiles as could be needed."""
    if plan.blocks is None:
        return function(query_rows, key_rows)
    return lax.cond(jnp.any(query_rows < num_queries), function, otherwise, query_rows, key_rows)


def _loop(plan: TilePlan, num_queries: int, num_keys: int, step: Callable[..., Any], state: Any) -> Any:
    """Runs `step(state, query_rows (a, t), key_rows (a, w*s))` over all tiles, a few at a time."""
    levels, num_tiles, tile = plan.query_rows.shape
    _, num_blocks, block = plan.key_rows.shape
    width = 1 if plan.blocks is None else plan.blocks.shape[-1]
    at_a_time = equal_size(num_tiles, SCORES_AT_A_TIME // (tile * width * block))

    def group(x: Array, fill: int) -> Array:
        """Groups (levels, A, ...) as (levels, A / a, a, ...), padded with `fill`."""
        extra = -x.shape[1] % at_a_time
        x = jnp.pad(x, [(0, 0), (0, extra), (0, 0)], constant_values=fill)
        return x.reshape(levels, -1, at_a_time, x.shape[-1])

    def tiles(state: Any, xs: tuple[Array, Array]) -> tuple[Any, None]:
        query_rows, key_rows = xs
        return step(state, query_rows, key_rows), None

    def level(state: Any, xs: tuple[Array, Array, Array | None]) -> tuple[Any, None]:
        query_rows, key_rows, blocks = xs
        if blocks is None:
            return lax.scan(tiles, state, (query_rows, key_rows))

        def named_tiles(state: Any, xs: tuple[Array, Array]) -> tuple[Any, None]:
            query_rows, blocks = xs
            keys = _take(key_rows, blocks, num_keys).reshape(at_a_time, width * block)
            return tiles(state, (query_rows, keys))

        return lax.scan(named_tiles, state, (query_rows, blocks))

    query_rows = group(plan.query_rows, num_queries)
    if plan.blocks is None:
        return lax.scan(level, state, (query_rows, group(plan.key_rows, num_keys), None))[0]
    return lax.scan(level, state, (query_rows, plan.key_rows, group(plan.blocks, num_blocks)))[0]
