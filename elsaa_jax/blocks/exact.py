"""Exact attention, block by block: O(N) memory and a log-sum-exp that can be differentiated."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax import checks, dispatch
from elsaa_jax.arrays.chunks import equal_size, largest_divisor, pad_axis
from elsaa_jax.arrays.masses import dot_rows, mix, softmax_pair
from elsaa_jax.blocks import kernels as block_kernels
from elsaa_jax.blocks import one_block as blocks
from elsaa_jax.types import Array, BranchOutput, Implementation
from pallas_kernels.configs import block_refusal

# Rows and columns of one tile of scores, and how many scores are computed at a time:
# 4 MiB of them stay in the cache of a CPU.
CHUNK = 256
SCORES_AT_A_TIME = 2**20


class Geometry(NamedTuple):
    """The static part of a call: R rows (batch x key/value heads) are independent problems."""

    scale: float
    is_causal: bool
    num_queries: int  # T
    num_keys: int  # S
    query_chunk: int
    key_chunk: int
    masked: bool


def exact_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> BranchOutput:
    """softmax(scale q k^T) v over all keys, or over the past (Eq. 1 and 2 of the paper).

    Args:
      query: (B, T, N, H).
      key: (B, S, K, H).
      value: (B, S, K, H).
      is_causal: query i, the (S - T + i)-th position, attends to positions up to its own.
      key_mask: (B, S) bool, True = attend.
      scale: factor of the logits; H**-0.5 where None.
      implementation: see `elsaa_jax.dispatch`.

    Returns:
      out (B, T, N, H), and log_mass (B, T, N), the log-sum-exp of the logits.
    """
    checks.check_qkv(query, key, value, is_causal)
    checks.check_mask("key_mask", key_mask, key.shape[0], key.shape[1])
    scale = checks.resolve_scale(scale, query.shape[-1])
    route = dispatch.route(implementation, block_refusal(query, key))
    geometry = make_geometry(query.shape[1], key.shape[1], is_causal, scale, key_mask is not None)
    return _exact((geometry, route), query, key, value, key_mask)


@functools.partial(jax.jit, static_argnums=0)
def _exact(
    static: tuple[Geometry, dispatch.Route], query: Array, key: Array, value: Array, key_mask: Array | None
) -> BranchOutput:
    key, value = checks.zero_masked_keys(key_mask, key, value)
    return BranchOutput(*_attend(static, query, key, value, key_mask))


def count_keys(query: Array, num_keys: int, is_causal: bool, key_mask: Array | None) -> Array:
    """How many keys each query sees where it sees all it may: (B, T, N) float32."""
    batch, num_queries = query.shape[:2]
    valid = jnp.ones((batch, num_keys), bool) if key_mask is None else key_mask
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    count = count[:, num_keys - num_queries :] if is_causal else jnp.broadcast_to(count[:, -1:], (batch, num_queries))
    return jnp.broadcast_to(count[:, :, None], query.shape[:3]).astype(jnp.float32)


def make_geometry(num_queries: int, num_keys: int, is_causal: bool, scale: float, masked: bool) -> Geometry:
    """The tiling of T queries against S keys."""
    chunks = equal_size(num_queries, CHUNK), equal_size(num_keys, CHUNK)
    return Geometry(scale, is_causal, num_queries, num_keys, *chunks, masked)


def to_rows(query: Array, key: Array, value: Array, key_mask: Array | None) -> tuple[Array, Array, Array, Array]:
    """(B, T, N, H), (B, S, K, H) -> (R, G, T, H), (R, S, H) with R = B * K, and the mask (R, S)."""
    batch, _, num_kv_heads, _ = key.shape
    valid = jnp.ones((batch * num_kv_heads, 1), bool)
    if key_mask is not None:
        valid = jnp.repeat(key_mask, num_kv_heads, axis=0)
    return to_query_rows(query, num_kv_heads), to_key_rows(key), to_key_rows(value), valid


def to_query_rows(x: Array, num_kv_heads: int) -> Array:
    """(B, T, N, ...) -> (R, G, T, ...)."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(x.shape[0] * num_kv_heads, -1, *x.shape[2:])


def from_query_rows(x: Array, batch: int) -> Array:
    """(R, G, T, ...) -> (B, T, N, ...)."""
    return jnp.moveaxis(x.reshape(batch, -1, *x.shape[2:]), 1, 2)


def to_key_rows(x: Array) -> Array:
    """(B, S, K, ...) -> (R, S, ...)."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(-1, *x.shape[2:])


def from_key_rows(x: Array, batch: int) -> Array:
    """(R, S, ...) -> (B, S, K, ...)."""
    return jnp.moveaxis(x.reshape(batch, -1, *x.shape[1:]), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: tuple[Geometry, dispatch.Route], query: Array, key: Array, value: Array, key_mask: Array | None
) -> tuple[Array, Array]:
    """out (B, T, N, H), in the query's dtype, and log_mass (B, T, N)."""
    geometry, route = static

    def kernels(query, key, value, key_mask):
        return block_kernels.forward(_layout(geometry, route), query, key, value, None, None, key_mask)

    def xla(query, key, value, key_mask):
        out, log_mass = forward(geometry, *to_rows(query, key, value, key_mask))
        batch = query.shape[0]
        return from_query_rows(out, batch).astype(query.dtype), from_query_rows(log_mass, batch)

    return dispatch.choose(route, kernels, xla, query, key, value, key_mask)


def _attend_fwd(static, query, key, value, key_mask):
    out, log_mass = _attend(static, query, key, value, key_mask)
    return (out, log_mass), (query, key, value, key_mask, out, log_mass)


def _attend_bwd(static, residuals, cotangents):
    geometry, route = static
    query, key, value, key_mask, out, log_mass = residuals
    d_out, d_log_mass = cotangents
    shift = row_shift(out, log_mass, d_out, d_log_mass)

    def kernels(query, key, value, key_mask, *rows):
        return block_kernels.backward(_layout(geometry, route), query, key, value, None, None, key_mask, *rows)

    def xla(query, key, value, key_mask, *rows):
        of_queries = (to_query_rows(x, key.shape[2]) for x in rows)
        d_query, *d_keys = backward(geometry, *to_rows(query, key, value, key_mask), *of_queries)
        batch = query.shape[0]
        derivatives = from_query_rows(d_query, batch), *(from_key_rows(d, batch) for d in d_keys)
        return tuple(d.astype(query.dtype) for d in derivatives)

    return *dispatch.choose(route, kernels, xla, query, key, value, key_mask, log_mass, d_out, shift), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _layout(geometry: Geometry, route: dispatch.Route) -> block_kernels.Layout:
    """One stretch that holds all keys."""
    stretch = geometry.num_keys, geometry.is_causal
    return block_kernels.Layout(geometry.scale, *stretch, route.target, route.arithmetic, route.launcher)


def row_shift(out: Array, log_mass: Array, d_out: Array, d_log_mass: Array) -> Array:
    """What the backward pass subtracts from d_out . v: out . d_out - d_log_mass; 0 without keys."""
    shift = dot_rows(out, d_out) - d_log_mass
    return jnp.where(jnp.isneginf(log_mass), 0.0, shift)


def forward(geometry: Geometry, query: Array, key: Array, value: Array, valid: Array) -> tuple[Array, Array]:
    """out (R, G, T, H) and log_mass (R, G, T), both float32; no derivative of its own."""
    query = _pad(query, 2, geometry.query_chunk)
    key, value = _pad(key, 1, geometry.key_chunk), _pad(value, 1, geometry.key_chunk)
    valid = _pad(valid, 1, geometry.key_chunk) if geometry.masked else valid
    out, log_mass = _map_rows(geometry, functools.partial(_forward_rows, geometry), query, key, value, valid)
    return out[:, :, : geometry.num_queries], log_mass[:, :, : geometry.num_queries]


def backward(
    geometry: Geometry,
    query: Array,
    key: Array,
    value: Array,
    valid: Array,
    log_mass: Array,
    d_out: Array,
    shift: Array,
) -> tuple[Array, Array, Array]:
    """d_query, d_key and d_value in float32; see `blocks.backward`."""
    num_queries, num_keys = geometry.num_queries, geometry.num_keys
    query, d_out = (_pad(x, 2, geometry.query_chunk) for x in (query, d_out))
    key, value = _pad(key, 1, geometry.key_chunk), _pad(value, 1, geometry.key_chunk)
    valid = _pad(valid, 1, geometry.key_chunk) if geometry.masked else valid
    # exp(logit - inf) is 0: a query without keys, or one that pads, has no weights.
    log_mass = jnp.where(jnp.isneginf(log_mass), jnp.inf, log_mass)
    log_mass = _pad(log_mass, 2, geometry.query_chunk, jnp.inf)
    shift = _pad(shift, 2, geometry.query_chunk)
    rows = functools.partial(_backward_rows, geometry)
    d_query, d_key, d_value = _map_rows(geometry, rows, query, key, value, valid, log_mass, d_out, shift)
    return d_query[:, :, :num_queries], d_key[:, :num_keys], d_value[:, :num_keys]


def _pad(x: Array, axis: int, multiple: int, fill: float = 0) -> Array:
    return pad_axis(x, axis, 0, -x.shape[axis] % multiple, fill)


def _map_rows(geometry: Geometry, function, *arrays):
    """Applies `function` to as many rows at a time as keep their scores in the cache."""
    num_rows, group = arrays[0].shape[:2]
    scores = group * geometry.query_chunk * geometry.key_chunk
    at_a_time = largest_divisor(num_rows, SCORES_AT_A_TIME // scores)
    if at_a_time == num_rows:
        return function(*arrays)
    split = [x.reshape(num_rows // at_a_time, at_a_time, *x.shape[1:]) for x in arrays]
    results = lax.map(lambda xs: function(*xs), split)
    return jax.tree.map(lambda x: x.reshape(num_rows, *x.shape[2:]), results)


def _chunk(x: Array, index: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _merge_group(x: Array) -> Array:
    """(R, G, C, ...) -> (R, G * C, ...): queries that read the same keys."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _bias(geometry: Geometry, group: int, valid: Array, i: Array, j: Array) -> Array:
    """What is added to the logits (R, G * C, C) of query chunk i and key chunk j: -inf where not attended."""
    rows, columns = geometry.query_chunk, geometry.key_chunk
    key_place = j * columns + jnp.arange(columns, dtype=jnp.int32)
    attended = jnp.ones((1, 1, 1), bool)
    if geometry.is_causal:
        query_place = geometry.num_keys - geometry.num_queries + i * rows + jnp.arange(rows, dtype=jnp.int32)
        attended = jnp.tile(key_place[None, :] <= query_place[:, None], (group, 1))[None]
    elif geometry.num_keys % columns and not geometry.masked:
        attended = (key_place < geometry.num_keys)[None, None, :]
    if geometry.masked:
        attended = attended & _chunk(valid, j, columns, 1)[:, None, :]
    return jnp.where(attended, 0.0, -jnp.inf)


def _forward_rows(geometry, query, key, value, valid):
    num_rows, group, num_queries, _ = query.shape
    rows, columns = geometry.query_chunk, geometry.key_chunk
    num_key_chunks = key.shape[1] // columns

    def query_chunk(i):
        query_i = _merge_group(_chunk(query, i, rows, 2))

        def attend(j):
            keys = _chunk(key, j, columns, 1), _chunk(value, j, columns, 1), _bias(geometry, group, valid, i, j)
            return blocks.forward(query_i, *keys, geometry.scale)

        def step(j, state):
            out, log_mass = attend(j)
            weights, log_mass = softmax_pair(state[1], log_mass)
            return mix(state[0], out, weights), log_mass

        last = num_key_chunks
        if geometry.is_causal:
            last_place = geometry.num_keys - geometry.num_queries + (i + 1) * rows - 1
            last = jnp.minimum(last_place // columns + 1, num_key_chunks)
        if num_key_chunks == 1:
            state = attend(jnp.int32(0))
        else:
            log_mass = jnp.full(query_i.shape[:2], -jnp.inf, jnp.float32)
            state = lax.fori_loop(0, last, step, (jnp.zeros(query_i.shape, jnp.float32), log_mass))
        return tuple(x.reshape(num_rows, group, rows, *x.shape[2:]) for x in state)

    num_query_chunks = num_queries // rows
    if num_query_chunks == 1:
        return query_chunk(jnp.int32(0))
    out, log_mass = lax.map(query_chunk, jnp.arange(num_query_chunks, dtype=jnp.int32))
    out, log_mass = (jnp.moveaxis(x, 0, 2) for x in (out, log_mass))
    return out.reshape(query.shape), log_mass.reshape(query.shape[:3])


def _backward_rows(geometry, query, key, value, valid, log_mass, d_out, shift):
    _, group, num_queries, _ = query.shape
    rows, columns = geometry.query_chunk, geometry.key_chunk

    def key_chunk(d_query, j):
        key_j, value_j = _chunk(key, j, columns, 1), _chunk(value, j, columns, 1)

        def step(i, state):
            d_query, d_key, d_value = state
            query_i, *rows_i = (_merge_group(_chunk(x, i, rows, 2)) for x in (query, log_mass, d_out, shift))
            bias = _bias(geometry, group, valid, i, j)
            d_query_i, d_key_i, d_value_i = blocks.backward(query_i, key_j, value_j, bias, geometry.scale, *rows_i)
            present = _chunk(d_query, i, rows, 2)
            d_query_i = present + d_query_i.reshape(present.shape)
            d_query = lax.dynamic_update_slice_in_dim(d_query, d_query_i, i * rows, 2)
            return d_query, d_key + d_key_i, d_value + d_value_i

        first = 0
        if geometry.is_causal:
            place = j * columns - (geometry.num_keys - geometry.num_queries)
            first = jnp.maximum(place, 0) // rows
        zeros = jnp.zeros(key_j.shape, jnp.float32)
        d_query, d_key, d_value = lax.fori_loop(first, num_queries // rows, step, (d_query, zeros, zeros))
        return d_query, (d_key, d_value)

    start = jnp.zeros(query.shape, jnp.float32)
    num_key_chunks = key.shape[1] // columns
    d_query, parts = lax.scan(key_chunk, start, jnp.arange(num_key_chunks, dtype=jnp.int32))
    d_key, d_value = (jnp.moveaxis(x, 0, 1).reshape(key.shape) for x in parts)
    return d_query, d_key, d_value
