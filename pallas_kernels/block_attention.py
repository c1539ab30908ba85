"""Attention of query tiles to key blocks. The kernels apply the sort permutation themselves.

The kernels read rows of q, k and v through index arrays and store results through the same index, so no sorted copy of
q, k, v or out exists. Sums are float32 and the softmax is online.

No two programs write the same address. Within one call a query row is in at most one tile and a key row in at most one
block. The forward kernel and the d_query kernel run one program per tile, which owns the query rows of that tile. The
kernel of d_key and d_value runs one program per block, which owns the key rows of that block and loops over the tiles
that attend to it. So there are no atomics. Calls that add to each other (the levels of the causal split) run one after
another: each call reads the sums that the previous call left in its rows and writes the new sums to the same memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.configs import KernelName, Settings
from pallas_kernels.launch import Array, DType, Ref, call, dot, put, put_numbers, take, take_numbers
from pallas_kernels.plan import Causal, Geometry, Plan

__all__ = ["Causal", "Geometry", "Plan", "backward_key", "backward_query", "forward"]


def forward(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    start: tuple[Array, Array] | None,
    dtype: DType,
    geometry: Geometry,
    settings: Settings,
) -> tuple[Array, Array]:
    """Computes the attention output and the log-sum-exp of the logits of every query row.

    This function alone chooses the launcher: `settings.launcher` says whether the Pallas kernel of this module or the
    Triton kernel of `triton_route` runs. Both give the same results.

    Args:
      plan: Pairs of tiles and blocks that attend to each other.
      query: Flattened queries, (B*T*N, H).
      key: Flattened keys, (B*S*K, H).
      value: Flattened values, (B*S*K, H).
      start: Output and log-sum-exp over other keys. They are merged into the results, and their memory is reused.
        None requires that the plan holds every query row.
      dtype: Dtype of the output, and of the output in `start`.
      geometry: Scale and causal mask.
      settings: Settings of the kernel "block_forward".

    Returns:
      The output, (B*T*N, H), and the log-sum-exp, (B*T*N,) float32. A query without keys gets 0 and -inf.
    """
    if settings.launcher == "jax-triton":
        # Imported here because the module needs triton, which is optional.
        from pallas_kernels import triton_route

        return triton_route.forward(plan, query, key, value, start, dtype, geometry, settings)
    kernel = functools.partial(_forward_kernel, geometry=geometry, settings=settings, merges=start is not None)
    shapes = jax.ShapeDtypeStruct(query.shape, dtype), jax.ShapeDtypeStruct(query.shape[:1], jnp.float32)
    arrays = [plan.query_rows, plan.key_rows, plan.first_block, plan.end_block, query, key, value]
    grid = (len(plan.query_rows),)
    out, log_mass = _accumulate(kernel, "block_forward", settings, grid, shapes, arrays, start)
    return out, log_mass


def backward_query(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    log_mass: Array,
    d_out: Array,
    shift: Array,
    start: Array | None,
    dtype: DType,
    geometry: Geometry,
    settings: Settings,
) -> Array:
    """Computes the gradient of the queries.

    With p = exp(logit - log_mass), the gradient of a logit is p (d_out . value - shift).

    Args:
      plan: Pairs of tiles and blocks that attend to each other.
      query: Flattened queries, (B*T*N, H).
      key: Flattened keys, (B*S*K, H).
      value: Flattened values, (B*S*K, H).
      log_mass: Log-sum-exp over all keys that a query saw, in this call or another, (B*T*N,); +inf without keys.
      d_out: Gradient of the output, (B*T*N, H).
      shift: out . d_out - d_log_mass, (B*T*N,) float32.
      start: Gradient to add to, whose memory is reused. None requires that the plan holds every query row.
      dtype: Dtype of the result, and of `start`.
      geometry: Scale and causal mask.
      settings: Settings of the kernel "block_backward_query".

    Returns:
      The gradient of the queries, (B*T*N, H).
    """
    kernel = functools.partial(_query_kernel, geometry=geometry, settings=settings, adds=start is not None)
    out = jax.ShapeDtypeStruct(query.shape, dtype)
    arrays = [plan.query_rows, plan.key_rows, plan.first_block, plan.end_block]
    arrays += [query, key, value, log_mass, d_out, shift]
    grid = (len(plan.query_rows),)
    starts = None if start is None else (start,)
    return _accumulate(kernel, "block_backward_query", settings, grid, (out,), arrays, starts)[0]


def backward_key(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    log_mass: Array,
    d_out: Array,
    shift: Array,
    start: tuple[Array, Array] | None,
    dtype: DType,
    geometry: Geometry,
    settings: Settings,
) -> tuple[Array, Array]:
    """Computes the gradients of the keys and values.

    Args:
      plan: Pairs of tiles and blocks that attend to each other.
      query: Flattened queries, (B*T*N, H).
      key: Flattened keys, (B*S*K, H).
      value: Flattened values, (B*S*K, H).
      log_mass: Log-sum-exp over all keys that a query saw, in this call or another, (B*T*N,); +inf without keys.
      d_out: Gradient of the output, (B*T*N, H).
      shift: out . d_out - d_log_mass, (B*T*N,) float32.
      start: Gradients to add to, whose memory is reused. None requires that the plan holds every key row.
      dtype: Dtype of the results, and of `start`.
      geometry: Scale and causal mask.
      settings: Settings of the kernel "block_backward_key".

    Returns:
      The gradients of the keys and of the values, (B*S*K, H) each.
    """
    kernel = functools.partial(_key_kernel, geometry=geometry, settings=settings, adds=start is not None)
    shapes = [jax.ShapeDtypeStruct(key.shape, dtype)] * 2
    arrays = [plan.query_rows, plan.key_rows, plan.first_tile, plan.end_tile]
    arrays += [query, key, value, log_mass, d_out, shift]
    grid = (len(plan.key_rows),)
    d_key, d_value = _accumulate(kernel, "block_backward_key", settings, grid, shapes, arrays, start)
    return d_key, d_value


def _accumulate(
    kernel: Callable[..., None],
    name: KernelName,
    settings: Settings,
    grid: tuple[int, ...],
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[Array],
    start: tuple[Array, ...] | None,
) -> tuple[Array, ...]:
    """Calls a kernel whose outputs begin with the values of `start`, in the memory of `start`, if it is given."""
    start = start or ()
    aliases = {len(arrays) + i: i for i in range(len(start))}
    return tuple(call(kernel, name, settings, grid, out_shapes, [*arrays, *start], aliases=aliases))


def _last_rows(geometry: Geometry, query_rows: Array, num_keys: int) -> Array:
    """Returns the last key row that each query of a tile may see. Padding keys lie behind it."""
    if geometry.causal is None:
        return jnp.full(query_rows.shape, num_keys - 1, jnp.int32)
    return jnp.minimum(geometry.causal.last_row(query_rows), num_keys - 1)


def _forward_kernel(*refs: Ref, geometry: Geometry, settings: Settings, merges: bool) -> None:
    """Attends one tile of queries to its blocks."""
    query_rows_ref, key_rows_ref, first_ref, end_ref, query_ref, key_ref, value_ref, *start, out_ref, mass_ref = refs
    tile = pl.program_id(0)
    rows = query_rows_ref[tile, :]
    query = take(query_ref, rows)
    last_rows = _last_rows(geometry, rows, key_ref.shape[0])
    if merges:
        out = take(start[0], rows).astype(jnp.float32)
        top = take_numbers(start[1], rows, -jnp.inf)
        total = jnp.where(top == -jnp.inf, np.float32(0.0), np.float32(1.0))
    else:
        out = jnp.zeros(query.shape, jnp.float32)
        top = jnp.full(rows.shape, -jnp.inf, jnp.float32)
        total = jnp.zeros(rows.shape, jnp.float32)

    def step(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = state
        key_rows = key_rows_ref[block, :]
        logits = dot(query, take(key_ref, key_rows), settings=settings, transpose_y=True) * geometry.scale
        logits = jnp.where(key_rows[None, :] <= last_rows[:, None], logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(logits - base[:, None])
        keep = jnp.exp(top - base)
        values = dot(weights.astype(value_ref.dtype), take(value_ref, key_rows), settings=settings)
        return out * keep[:, None] + values, new_top, total * keep + jnp.sum(weights, axis=1)

    out, top, total = lax.fori_loop(first_ref[tile], end_ref[tile], step, (out, top, total))
    nonzero = jnp.where(total > 0, total, 1.0)
    put(out_ref, rows, out / nonzero[:, None])
    put_numbers(mass_ref, rows, jnp.where(total > 0, top + jnp.log(nonzero), -jnp.inf))


def _query_kernel(*refs: Ref, geometry: Geometry, settings: Settings, adds: bool) -> None:
    """Computes the gradient of one tile of queries."""
    query_rows_ref, key_rows_ref, first_ref, end_ref, query_ref, key_ref, value_ref = refs[:7]
    mass_ref, d_out_ref, shift_ref, *start, d_query_ref = refs[7:]
    tile = pl.program_id(0)
    rows = query_rows_ref[tile, :]
    query, d_out = take(query_ref, rows), take(d_out_ref, rows)
    log_mass, shift = take_numbers(mass_ref, rows, jnp.inf), take_numbers(shift_ref, rows, 0.0)
    last_rows = _last_rows(geometry, rows, key_ref.shape[0])

    def step(block: Array, d_query: Array) -> Array:
        key_rows = key_rows_ref[block, :]
        key = take(key_ref, key_rows)
        logits = dot(query, key, settings=settings, transpose_y=True) * geometry.scale
        logits = jnp.where(key_rows[None, :] <= last_rows[:, None], logits, -jnp.inf)
        weights = jnp.exp(logits - log_mass[:, None])
        d_weights = dot(d_out, take(value_ref, key_rows), settings=settings, transpose_y=True)
        d_logits = weights * (d_weights - shift[:, None]) * geometry.scale
        return d_query + dot(d_logits.astype(key.dtype), key, settings=settings)

    zeros = jnp.zeros(query.shape, jnp.float32)
    d_query = lax.fori_loop(first_ref[tile], end_ref[tile], step, zeros)
    if adds:
        d_query = d_query + take(start[0], rows).astype(jnp.float32)
    put(d_query_ref, rows, d_query)


def _key_kernel(*refs: Ref, geometry: Geometry, settings: Settings, adds: bool) -> None:
    """Computes the gradients of one block of keys and values."""
    query_rows_ref, key_rows_ref, first_ref, end_ref, query_ref, key_ref, value_ref = refs[:7]
    mass_ref, d_out_ref, shift_ref, *start, d_key_ref, d_value_ref = refs[7:]
    block = pl.program_id(0)
    key_rows = key_rows_ref[block, :]
    key, value = take(key_ref, key_rows), take(value_ref, key_rows)

    def step(tile: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        d_key, d_value = state
        rows = query_rows_ref[tile, :]
        query, d_out = take(query_ref, rows), take(d_out_ref, rows)
        log_mass, shift = take_numbers(mass_ref, rows, jnp.inf), take_numbers(shift_ref, rows, 0.0)
        last_rows = _last_rows(geometry, rows, key_ref.shape[0])
        logits = dot(key, query, settings=settings, transpose_y=True) * geometry.scale
        logits = jnp.where(key_rows[:, None] <= last_rows[None, :], logits, -jnp.inf)
        weights = jnp.exp(logits - log_mass[None, :])
        d_value = d_value + dot(weights.astype(d_out.dtype), d_out, settings=settings)
        d_weights = dot(value, d_out, settings=settings, transpose_y=True)
        d_logits = weights * (d_weights - shift[None, :]) * geometry.scale
        return d_key + dot(d_logits.astype(query.dtype), query, settings=settings), d_value

    zeros = jnp.zeros(key.shape, jnp.float32)
    d_key, d_value = lax.fori_loop(first_ref[block], end_ref[block], step, (zeros, zeros))
    if adds:
        d_key = d_key + take(start[0], key_rows).astype(jnp.float32)
        d_value = d_value + take(start[1], key_rows).astype(jnp.float32)
    put(d_key_ref, key_rows, d_key)
    put(d_value_ref, key_rows, d_value)
