"""Attention of tiles of queries to blocks of keys, with the permutation inside.

Rows of q, k and v are read through index arrays and results are stored through the same index, so
that no sorted copy of q, k, v or out exists. Sums are float32, the softmax is online.

Who writes what. Within one call a query row stands in at most one tile and a key row in at most one
block. The forward kernel and the one of d_query run one program for each tile, which owns its query
rows; the kernel of d_key and d_value runs one program for each block, which owns its key rows and
walks through the tiles that attend to it. So no two programs write one address, and there are no
atomics. Calls that add to each other (the levels of a causal split) follow one another: each reads
what the last one left in the rows it owns, and writes them back into the same memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.configs import Settings
from pallas_kernels.launch import Array, DType, Ref, call, div, dot, put, put_numbers, rem, take, take_numbers


class Plan(NamedTuple):
    """Which queries attend to which keys, int32 all of it.

    A row past the end of the queries or keys is no row.

    Attributes:
      query_rows: (A, t), rows of the queries (B*T*N, H) of each tile; t a power of two >= 16.
      key_rows: (C, s), rows of the keys (B*S*K, H) of each block; s a power of two >= 16.
      first_block, end_block: (A,), tile a attends to the blocks first_block <= c < end_block.
      first_tile, end_tile: (C,), the tiles first_tile <= a < end_tile attend to block c, and no other with a query.
    """

    query_rows: Array
    key_rows: Array
    first_block: Array
    end_block: Array
    first_tile: Array
    end_tile: Array


class Causal(NamedTuple):
    """Query i of T, at position S - T + i, sees keys up to its own position."""

    num_queries: int  # T
    num_keys: int  # S
    num_heads: int  # N
    num_kv_heads: int  # K

    def last_row(self, rows: Array) -> Array:
        """The last key row that each query row (b, i, n) sees: that of its own position and head."""
        length, heads, kv_heads = self.num_queries, self.num_heads, self.num_kv_heads
        batch, position, head = div(rows, length * heads), rem(div(rows, heads), length), rem(rows, heads)
        position = position + (self.num_keys - length)
        return (batch * self.num_keys + position) * kv_heads + div(head, heads // kv_heads)


class Geometry(NamedTuple):
    """The static part of a call."""

    scale: float
    causal: Causal | None  # None: a tile sees all of its blocks


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
    """out (B*T*N, H) and the log-sum-exp (B*T*N) of the logits, float32; 0 and -inf without keys.

    Args:
      plan: who attends to whom.
      query: (B*T*N, H).
      key: (B*S*K, H).
      value: (B*S*K, H).
      start: out and log-sum-exp over other keys, which are merged in and whose memory is used
        again. None: every query stands in a tile.
      dtype: of out, and of that of `start`.
      geometry: scale and causality.
      settings: of the kernel "block_forward"; their launcher says whether it is this kernel or that of `triton_route`.
    """
    if settings.launcher == "jax-triton":
        from pallas_kernels import triton_route

        return triton_route.forward(plan, query, key, value, start, dtype, geometry, settings)
    kernel = functools.partial(_forward_kernel, geometry=geometry, settings=settings, merges=start is not None)
    out = jax.ShapeDtypeStruct(query.shape, dtype)
    log_mass = jax.ShapeDtypeStruct(query.shape[:1], jnp.float32)
    arrays = [plan.query_rows, plan.key_rows, plan.first_block, plan.end_block, query, key, value]
    grid = (len(plan.query_rows),)
    return _accumulate(kernel, "block_forward", settings, grid, (out, log_mass), arrays, start)


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
    """d_query (B*T*N, H). With p = exp(logit - log_mass), d_logit = p (d_out . v - shift).

    Args:
      plan: as in `forward`.
      query: as in `forward`.
      key: as in `forward`.
      value: as in `forward`.
      log_mass: (B*T*N) over all keys that a query saw, in this call or another; +inf without keys.
      d_out: (B*T*N, H).
      shift: (B*T*N) float32, out . d_out - d_log_mass.
      start: what is added to, and whose memory is used again. None: every query stands in a tile.
      dtype: of d_query, and of `start`.
      geometry: scale and causality.
      settings: of the kernel "block_backward_query".
    """
    kernel = functools.partial(_query_kernel, geometry=geometry, settings=settings, adds=start is not None)
    out = jax.ShapeDtypeStruct(query.shape, dtype)
    arrays = [plan.query_rows, plan.key_rows, plan.first_block, plan.end_block]
    arrays += [query, key, value, log_mass, d_out, shift]
    grid = (len(plan.query_rows),)
    starts = None if start is None else (start,)
    name = "block_backward_query"
    return _accumulate(kernel, name, settings, grid, (out,), arrays, starts)[0]


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
    """d_key and d_value (B*S*K, H); arguments as of `backward_query`. None: every key stands in a block."""
    kernel = functools.partial(_key_kernel, geometry=geometry, settings=settings, adds=start is not None)
    shapes = [jax.ShapeDtypeStruct(key.shape, dtype)] * 2
    arrays = [plan.query_rows, plan.key_rows, plan.first_tile, plan.end_tile]
    arrays += [query, key, value, log_mass, d_out, shift]
    grid = (len(plan.key_rows),)
    return _accumulate(kernel, "block_backward_key", settings, grid, shapes, arrays, start)


def _accumulate(kernel, name, settings, grid, out_shapes, arrays, start):
    """A call whose outputs start as `start`, in its memory, where there is one."""
    start = start or ()
    aliases = {len(arrays) + i: i for i in range(len(start))}
    return tuple(call(kernel, name, settings, grid, out_shapes, [*arrays, *start], aliases=aliases))


def _last_rows(geometry: Geometry, query_rows: Array, num_keys: int) -> Array:
    """The last key row that each query of a tile may see; a key that is no row lies behind it."""
    if geometry.causal is None:
        return jnp.full(query_rows.shape, num_keys - 1, jnp.int32)
    return jnp.minimum(geometry.causal.last_row(query_rows), num_keys - 1)


def _forward_kernel(*refs: Ref, geometry: Geometry, settings: Settings, merges: bool) -> None:
    query_rows_ref, key_rows_ref, first_ref, end_ref, query_ref, key_ref, value_ref, *start, out_ref, mass_ref = refs
    tile = pl.program_id(0)
    rows = query_rows_ref[tile, :]
    query = take(query_ref, rows)
    last_rows = _last_rows(geometry, rows, key_ref.shape[0])
    if merges:
        out = take(start[0], rows).astype(jnp.float32)
        top = take_numbers(start[1], rows, -jnp.inf)
        total = jnp.where(top == -jnp.inf, 0.0, 1.0)
    else:
        out = jnp.zeros(query.shape, jnp.float32)
        top = jnp.full(rows.shape, -jnp.inf, jnp.float32)
        total = jnp.zeros(rows.shape, jnp.float32)

    def step(block, state):
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
    query_rows_ref, key_rows_ref, first_ref, end_ref, query_ref, key_ref, value_ref = refs[:7]
    mass_ref, d_out_ref, shift_ref, *start, d_query_ref = refs[7:]
    tile = pl.program_id(0)
    rows = query_rows_ref[tile, :]
    query, d_out = take(query_ref, rows), take(d_out_ref, rows)
    log_mass, shift = take_numbers(mass_ref, rows, jnp.inf), take_numbers(shift_ref, rows, 0.0)
    last_rows = _last_rows(geometry, rows, key_ref.shape[0])

    def step(block, d_query):
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
    query_rows_ref, key_rows_ref, first_ref, end_ref, query_ref, key_ref, value_ref = refs[:7]
    mass_ref, d_out_ref, shift_ref, *start, d_key_ref, d_value_ref = refs[7:]
    block = pl.program_id(0)
    key_rows = key_rows_ref[block, :]
    key, value = take(key_ref, key_rows), take(value_ref, key_rows)

    def step(tile, state):
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
