"""Exact attention within stretches in XLA, chunk by chunk: linear memory and a log-sum-exp that has a derivative.

Rows (R, G, T, H) and (R, S, H) are independent problems: one key/value head of one stretch, with the G query heads
that read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.arrays.chunks import equal_size, largest_divisor, pad_axis
from elsaa_jax.arrays.masses import mix, softmax_pair
from elsaa_jax.blocks import one_block
from elsaa_jax.blocks.stretches import Stretches
from elsaa_jax.types import Array

# Rows and columns of one tile of scores, and how many scores are computed at a time: 4 MiB of them stay in the cache
# of a CPU.
CHUNK = 256
SCORES_AT_A_TIME = 2**20


class Span(NamedTuple):
    """T queries at the end of S keys, and the chunks in which they are computed.

    Attributes:
      scale: Factor of the logits.
      is_causal: Whether a query attends to its past only.
      num_queries: T.
      num_keys: S.
      query_chunk: Queries of a chunk.
      key_chunk: Keys of a chunk.
      masked: Whether there is a key mask.
      stretches_at_a_time: Stretches whose scores stay in the cache.
      rows_at_a_time: Rows of these whose scores stay in the cache.
    """

    scale: float
    is_causal: bool
    num_queries: int
    num_keys: int
    query_chunk: int
    key_chunk: int
    masked: bool
    stretches_at_a_time: int
    rows_at_a_time: int


def forward(
    stretches: Stretches, scale: float, query: Array, key: Array, value: Array, key_mask: Array | None
) -> tuple[Array, Array]:
    """Returns the output (B, T, N, H) and the log-mass (B, T, N) within the stretches, both float32."""
    span = _make_span(stretches, scale, query, key, key_mask)

    def attend(query: Array, key: Array, value: Array, key_mask: Array | None) -> tuple[Array, ...]:
        rows = _to_query_rows(span, query, key.shape[2]), *_to_key_rows(span, key, value, key_mask)
        out, log_mass = _map_rows(span, _forward_rows, *rows)
        return _from_rows(out, len(query), span.num_queries), _from_rows(log_mass, len(query), span.num_queries)

    inputs = _split(stretches, query, key, value, key_mask)
    out, log_mass = _map_stretches(span, attend, *inputs)
    return stretches.join(out, "queries"), stretches.join(log_mass, "queries")


def backward(
    stretches: Stretches,
    scale: float,
    query: Array,
    key: Array,
    value: Array,
    key_mask: Array | None,
    log_mass: Array,
    d_out: Array,
    shift: Array,
) -> tuple[Array, Array, Array]:
    """Returns d_query, d_key and d_value in float32. `log_mass` is +inf for a query without keys."""
    span = _make_span(stretches, scale, query, key, key_mask)

    def derive(
        query: Array,
        key: Array,
        value: Array,
        key_mask: Array | None,
        log_mass: Array,
        d_out: Array,
        shift: Array,
    ) -> tuple[Array, ...]:
        to_rows = functools.partial(_to_query_rows, span, num_kv_heads=key.shape[2])
        # exp(logit - inf) is 0: padding has no weights.
        rows = to_rows(log_mass, fill=jnp.inf), to_rows(d_out), to_rows(shift)
        keys = _to_key_rows(span, key, value, key_mask)
        batch = len(query)
        d_query, d_key, d_value = _map_rows(span, _backward_rows, to_rows(query), *keys, *rows)
        d_key, d_value = (
            _from_rows(d_key[:, None], batch, span.num_keys),
            _from_rows(d_value[:, None], batch, span.num_keys),
        )
        return _from_rows(d_query, batch, span.num_queries), d_key, d_value

    inputs = _split(stretches, query, key, value, key_mask)
    # Queries that pad the first and the last stretch have weights, but no cotangent.
    rows = [stretches.split(x, "queries") for x in (log_mass, d_out, shift)]
    d_query, d_key, d_value = _map_stretches(span, derive, *inputs, *rows)
    return stretches.join(d_query, "queries"), stretches.join(d_key, "keys"), stretches.join(d_value, "keys")


def _make_span(stretches: Stretches, scale: float, query: Array, key: Array, key_mask: Array | None) -> Span:
    num_queries, num_keys, number = stretches.queries_each, stretches.keys_each, query.shape[0] * stretches.number
    chunks = equal_size(num_queries, CHUNK), equal_size(num_keys, CHUNK)
    at_a_time = SCORES_AT_A_TIME // (chunks[0] * chunks[1])  # Heads whose scores are computed at a time.
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    some = largest_divisor(number, at_a_time // num_heads)
    rows = largest_divisor(some * num_kv_heads, at_a_time // (num_heads // num_kv_heads))
    return Span(scale, stretches.is_causal, num_queries, num_keys, *chunks, key_mask is not None, some, rows)


def _split(
    stretches: Stretches, query: Array, key: Array, value: Array, key_mask: Array | None
) -> tuple[Array | None, ...]:
    keys = (None if x is None else stretches.split(x, "keys") for x in (key, value, key_mask))
    return stretches.split(query, "queries"), *keys


def _map_stretches(span: Span, function: Callable[..., tuple[Array, ...]], *arrays: Array | None) -> tuple[Array, ...]:
    """Applies `function` to a few stretches at a time, so that each is transposed while it is in the cache."""
    assert arrays[0] is not None
    number, at_a_time = arrays[0].shape[0], span.stretches_at_a_time
    if at_a_time == number:
        return function(*arrays)

    def group(x: Array | None) -> Array | None:
        # Stretches and tokens are one axis: XLA copies the input of a loop that has an axis of size 1.
        return None if x is None else x.reshape(-1, at_a_time * x.shape[1], *x.shape[2:])

    def some(xs: tuple[Array | None, ...]) -> tuple[Array, ...]:
        parts = (None if x is None else x.reshape(at_a_time, -1, *x.shape[1:]) for x in xs)
        return tuple(x.reshape(-1, *x.shape[2:]) for x in function(*parts))

    results = lax.map(some, tuple(group(x) for x in arrays))
    return tuple(x.reshape(number, -1, *x.shape[2:]) for x in results)


def _map_rows(span: Span, function: Callable[..., Any], *arrays: Array) -> Any:
    """Applies `function` to as many rows at a time as keep their scores in the cache."""
    function = functools.partial(function, span)
    num_rows, at_a_time = arrays[0].shape[0], span.rows_at_a_time
    if at_a_time == num_rows:
        return function(*arrays)
    split = [x.reshape(num_rows // at_a_time, at_a_time, *x.shape[1:]) for x in arrays]
    results = lax.map(lambda xs: function(*xs), split)
    return jax.tree.map(lambda x: x.reshape(num_rows, *x.shape[2:]), results)


def _to_query_rows(span: Span, x: Array, num_kv_heads: int, fill: float = 0) -> Array:
    """Transposes (B, T, N, ...) to (R, G, T, ...), padded with `fill` to whole chunks."""
    x = jnp.moveaxis(x, 2, 1)
    x = x.reshape(x.shape[0] * num_kv_heads, -1, *x.shape[2:])
    return pad_axis(x, 2, 0, -x.shape[2] % span.query_chunk, fill)


def _from_rows(x: Array, batch: int, length: int) -> Array:
    """Transposes (R, heads, tokens, ...) to (B, length, K * heads, ...), without the padding."""
    return jnp.moveaxis(x[:, :, :length].reshape(batch, -1, length, *x.shape[3:]), 1, 2)


def _to_key_rows(span: Span, key: Array, value: Array, key_mask: Array | None) -> tuple[Array, Array, Array]:
    """Transposes keys and values (B, S, K, H) to (R, S, H) and the mask to (R, S), padded to whole chunks."""
    num_kv_heads, extra = key.shape[2], -key.shape[1] % span.key_chunk
    valid = jnp.ones((key.shape[0] * num_kv_heads, 1), bool)
    if key_mask is not None:
        valid = pad_axis(jnp.repeat(key_mask, num_kv_heads, axis=0), 1, 0, extra)
    key, value = (jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], x.shape[3]) for x in (key, value))
    return pad_axis(key, 1, 0, extra), pad_axis(value, 1, 0, extra), valid


def _chunk(x: Array, index: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _merge_group(x: Array) -> Array:
    """Joins the queries that read the same keys: (R, G, C, ...) -> (R, G * C, ...)."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _bias(span: Span, group: int, valid: Array, i: Array, j: Array) -> Array:
    """Returns the mask that is added to the logits (R, G * C, C) of query chunk i and key chunk j: 0 or -inf."""
    rows, columns = span.query_chunk, span.key_chunk
    key_place = j * columns + jnp.arange(columns, dtype=jnp.int32)
    attended = jnp.ones((1, 1, 1), bool)
    if span.is_causal:
        query_place = span.num_keys - span.num_queries + i * rows + jnp.arange(rows, dtype=jnp.int32)
        attended = jnp.tile(key_place[None, :] <= query_place[:, None], (group, 1))[None]
    elif span.num_keys % columns and not span.masked:
        attended = (key_place < span.num_keys)[None, None, :]
    if span.masked:
        attended = attended & _chunk(valid, j, columns, 1)[:, None, :]
    return jnp.where(attended, 0.0, -jnp.inf)


def _forward_rows(span: Span, query: Array, key: Array, value: Array, valid: Array) -> tuple[Array, Array]:
    num_rows, group, num_queries, _ = query.shape
    rows, columns = span.query_chunk, span.key_chunk
    num_key_chunks = key.shape[1] // columns

    def query_chunk(i: Array) -> tuple[Array, Array]:
        query_i = _merge_group(_chunk(query, i, rows, 2))

        def attend(j: Array) -> tuple[Array, Array]:
            keys = _chunk(key, j, columns, 1), _chunk(value, j, columns, 1), _bias(span, group, valid, i, j)
            return one_block.forward(query_i, *keys, span.scale)

        def step(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            out, log_mass = attend(j)
            weights, log_mass = softmax_pair(state[1], log_mass)
            return mix(state[0], out, weights), log_mass

        last: int | Array = num_key_chunks
        if span.is_causal:
            last_place = span.num_keys - span.num_queries + (i + 1) * rows - 1
            last = jnp.minimum(last_place // columns + 1, num_key_chunks)
        if num_key_chunks == 1:
            state = attend(jnp.int32(0))
        else:
            log_mass = jnp.full(query_i.shape[:2], -jnp.inf, jnp.float32)
            state = lax.fori_loop(0, last, step, (jnp.zeros(query_i.shape, jnp.float32), log_mass))
        out, log_mass = (x.reshape(num_rows, group, rows, *x.shape[2:]) for x in state)
        return out, log_mass

    num_query_chunks = num_queries // rows
    if num_query_chunks == 1:
        return query_chunk(jnp.int32(0))
    out, log_mass = lax.map(query_chunk, jnp.arange(num_query_chunks, dtype=jnp.int32))
    out, log_mass = (jnp.moveaxis(x, 0, 2) for x in (out, log_mass))
    return out.reshape(query.shape), log_mass.reshape(query.shape[:3])


def _backward_rows(
    span: Span,
    query: Array,
    key: Array,
    value: Array,
    valid: Array,
    log_mass: Array,
    d_out: Array,
    shift: Array,
) -> tuple[Array, Array, Array]:
    _, group, num_queries, _ = query.shape
    rows, columns = span.query_chunk, span.key_chunk

    def key_chunk(d_query: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        key_j, value_j = _chunk(key, j, columns, 1), _chunk(value, j, columns, 1)

        def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_key, d_value = state
            query_i, *rows_i = (_merge_group(_chunk(x, i, rows, 2)) for x in (query, log_mass, d_out, shift))
            bias = _bias(span, group, valid, i, j)
            d_query_i, d_key_i, d_value_i = one_block.backward(query_i, key_j, value_j, bias, span.scale, *rows_i)
            present = _chunk(d_query, i, rows, 2)
            d_query_i = present + d_query_i.reshape(present.shape)
            d_query = lax.dynamic_update_slice_in_dim(d_query, d_query_i, i * rows, 2)
            return d_query, d_key + d_key_i, d_value + d_value_i

        first: int | Array = 0
        if span.is_causal:
            place = j * columns - (span.num_keys - span.num_queries)
            first = jnp.maximum(place, 0) // rows
        zeros = jnp.zeros(key_j.shape, jnp.float32)
        d_query, d_key, d_value = lax.fori_loop(first, num_queries // rows, step, (d_query, zeros, zeros))
        return d_query, (d_key, d_value)

    start = jnp.zeros(query.shape, jnp.float32)
    num_key_chunks = key.shape[1] // columns
    d_query, parts = lax.scan(key_chunk, start, jnp.arange(num_key_chunks, dtype=jnp.int32))
    d_key, d_value = parts
    return d_query, jnp.moveaxis(d_key, 0, 1).reshape(key.shape), jnp.moveaxis(d_value, 0, 1).reshape(key.shape)
