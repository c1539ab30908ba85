"""RACE backward: one kernel computes the gradients at the queries, another those at the keys.

For one query, let X be the sum over the keys it sees of (d_out . value) times the key's code, and Y the sum of the
codes alone. Then Den = codes . Y / L, d_out . Num = codes . X / L and d_codes = (w X + d_Den Y) / L, where
w = 1 / (Den + eps). One pass over the keys gives X and Y, so the forward pass keeps only the bucket sums.

A program owns a chunk: its query rows or key rows, its gradients of the buckets, and its partial sums of d_planes and
d_beta, which XLA adds up afterwards. So no two programs write the same address.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.configs import Settings, fit
from pallas_kernels.launch import (
    Array,
    Ref,
    call,
    div,
    dot,
    ones_where,
    put,
    put_numbers,
    rem,
    take,
    take_numbers,
)
from pallas_kernels.race import Geometry, Inputs, hash_of, key_codes, last_tile
from pallas_kernels.soft_codes import derive, soft_codes


class QueryDerivatives(NamedTuple):
    """Results of the kernel at the queries. All arrays but `d_query` are float32.

    Attributes:
      d_query: Gradient of the queries, (B*T*N, H).
      weight: w = 1 / (Den + eps), times the weight of the output if there is one, (B*T*N,). So d_Num = weight d_out.
      d_den: Whole gradient of Den, (B*T*N,).
      d_mass: Gradient of the bucket masses that the queries of each chunk read, (query chunks, R, F).
      d_values: Gradient of the bucket values that they read, (query chunks, R, F, H).
      d_planes: Partial sums of the gradient of the planes, (query chunks, R, planes, H).
      d_beta: Partial sums of the gradient of beta, (query chunks, R).
      d_weight: Gradient d_out . out of the weight of the output, (B*T*N,). Without a weight: (1,), not written.
    """

    d_query: Array
    weight: Array
    d_den: Array
    d_mass: Array
    d_values: Array
    d_planes: Array
    d_beta: Array
    d_weight: Array


class KeyDerivatives(NamedTuple):
    """Results of the kernel at the keys.

    Attributes:
      d_key: Gradient of the keys, (B*S*K, H).
      d_value: Gradient of the values, (B*S*K, H).
      d_planes: Partial sums of the gradient of the planes, (chunks, R, planes, H) float32.
      d_beta: Partial sums of the gradient of beta, (chunks, R) float32.
    """

    d_key: Array
    d_value: Array
    d_planes: Array
    d_beta: Array


def backward_query(
    inputs: Inputs,
    query: Array,
    mass: Array,
    values: Array,
    d_out: Array,
    d_den: Array,
    geometry: Geometry,
    settings: Settings,
    out_weight: Array | None = None,
) -> QueryDerivatives:
    """Computes the gradients at the queries.

    Args:
      inputs: Keys, values, planes, numbers and mask.
      query: Flattened queries, (B*T*N, H).
      mass: Bucket masses that `race.readout` read.
      values: Bucket values that `race.readout` read.
      d_out: Gradient of the output, or of out_weight * output, (B*T*N, H).
      d_den: Gradient of Den, (B*T*N,).
      geometry: Sizes and options of the call.
      settings: Settings of the kernel "race_backward_query".
      out_weight: Weight by which the output was multiplied, (B*T*N,) float32, or None.
    """
    shape = geometry.query_chunks, geometry.num_rows
    features, planes, head_dim = geometry.tables.num_features, geometry.tables.num_planes, query.shape[1]
    numbers = jax.ShapeDtypeStruct(query.shape[:1], jnp.float32)
    sums = ((*shape, features), (*shape, features, head_dim), (*shape, planes, head_dim), shape)
    shapes = [jax.ShapeDtypeStruct(query.shape, query.dtype), numbers, numbers]
    shapes += [jax.ShapeDtypeStruct(s, jnp.float32) for s in sums]
    shapes += [numbers if out_weight is not None else jax.ShapeDtypeStruct((1,), jnp.float32)]
    kernel = functools.partial(_query_kernel, geometry=geometry, settings=settings)
    arrays = [*inputs, query, mass, values, d_out, d_den, *([] if out_weight is None else [out_weight])]
    grid = (geometry.query_chunks * geometry.num_rows,)
    return QueryDerivatives(*call(kernel, "race_backward_query", settings, grid, shapes, arrays))


def backward_key(
    inputs: Inputs,
    query: Array,
    d_mass: Array,
    d_values: Array,
    d_out: Array,
    weight: Array,
    d_den: Array,
    geometry: Geometry,
    settings: Settings,
) -> KeyDerivatives:
    """Computes the gradients at the keys and values.

    Args:
      inputs: Keys, values, planes, numbers and mask.
      query: Flattened queries, (B*T*N, H).
      d_mass: Gradient of the bucket masses of each chunk, (chunks, R, F); non-causal: (1, R, F).
      d_values: Gradient of the bucket values of each chunk, (chunks, R, F, H); non-causal: (1, R, F, H).
      d_out: Gradient of the output, (B*T*N, H).
      weight: Result `weight` of `backward_query`, (B*T*N,).
      d_den: Result `d_den` of `backward_query`, (B*T*N,).
      geometry: Sizes and options of the call.
      settings: Settings of the kernel "race_backward_key".
    """
    shape = geometry.num_chunks, geometry.num_rows
    like_key = jax.ShapeDtypeStruct(inputs.key.shape, inputs.key.dtype)
    sums = (*shape, geometry.tables.num_planes, query.shape[1]), shape
    shapes = [like_key, like_key, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in sums)]
    kernel = functools.partial(_key_kernel, geometry=geometry, settings=settings)
    arrays = [*inputs, query, d_mass, d_values, d_out, weight, d_den]
    grid = (geometry.num_chunks * geometry.num_rows,)
    return KeyDerivatives(*call(kernel, "race_backward_key", settings, grid, shapes, arrays))


def _query_kernel(*refs: Ref, geometry: Geometry, settings: Settings) -> None:
    """Computes the gradients at the queries of one chunk of one problem."""
    inputs, (query_ref, mass_ref, values_ref, d_out_ref, d_den_ref, *out_weight) = Inputs(*refs[:5]), refs[5:-8]
    results = QueryDerivatives(*refs[-8:])
    size, key_size = (fit(n, geometry.chunk) for n in (settings.query_tile, settings.key_tile))
    tiles = -(-geometry.chunk // size)
    program = pl.program_id(0)
    row, local_chunk = rem(program, geometry.num_rows), div(program, geometry.num_rows)
    chunk = local_chunk + geometry.first_chunk
    hashed, eps = hash_of(inputs, row, geometry), inputs.numbers[1]
    scale = 1.0 / geometry.tables.num_tables
    state = local_chunk if geometry.is_causal else 0

    def tile_step(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        tile, head = rem(index, tiles), div(index, tiles)
        place, rows = geometry.query_rows(row, head, chunk, tile, size)
        codes = soft_codes(take(query_ref, rows), hashed, geometry.tables, settings)
        d_out = take(d_out_ref, rows).astype(jnp.float32)
        values = dot(d_out, values_ref[state, row, :, :], settings=settings, transpose_y=True)
        mass = jnp.broadcast_to(mass_ref[state, row, :][None, :], values.shape)
        if geometry.is_causal:

            def step(key_tile: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
                values, mass = state
                key_place, key_rows, tokens = geometry.key_rows(row, chunk, key_tile, key_size)
                past = key_codes(inputs, key_rows, tokens, hashed, geometry, settings).codes
                value = take(inputs.value, key_rows).astype(jnp.float32)
                seen = key_place[None, :] <= place[:, None]
                of_values = jnp.where(seen, dot(d_out, value, settings=settings, transpose_y=True), 0.0)
                of_mass = ones_where(seen)
                return (
                    values + dot(of_values, past, settings=settings),
                    mass + dot(of_mass, past, settings=settings),
                )

            end = last_tile(tile, size, key_size, geometry.chunk)
            values, mass = lax.fori_loop(0, end, step, (values, mass))
        den = jnp.sum(codes.codes * mass, axis=1) * scale
        there = den > 0
        weight = 1.0 / jnp.where(there, den + eps, 1.0)
        d_weight = jnp.sum(codes.codes * values, axis=1) * scale * weight
        d_den = -d_weight * weight
        if out_weight:
            put_numbers(results.d_weight, rows, d_weight)
            factor = take_numbers(out_weight[0], rows, 0.0)
            weight, d_den = weight * factor, d_den * factor
        d_den = jnp.where(there, d_den, 0.0) + take_numbers(d_den_ref, rows, 0.0)
        d_codes = (weight[:, None] * values + d_den[:, None] * mass) * scale
        d_query, d_planes, d_beta = derive(codes, d_codes, hashed, geometry.tables, settings)
        put(results.d_query, rows, d_query)
        put_numbers(results.weight, rows, weight)
        put_numbers(results.d_den, rows, d_den)
        d_mass = jnp.sum(codes.codes * d_den[:, None], axis=0) * scale
        d_values = dot(codes.codes, d_out * (weight * scale)[:, None], settings=settings, transpose_x=True)
        return sums[0] + d_mass, sums[1] + d_values, sums[2] + d_planes, sums[3] + d_beta

    features, head_dim = values_ref.shape[2:]
    planes = geometry.tables.num_planes, head_dim
    zeros = tuple(jnp.zeros(s, jnp.float32) for s in ((features,), (features, head_dim), planes, ()))
    d_mass, d_values, d_planes, d_beta = lax.fori_loop(0, tiles * geometry.group, tile_step, zeros)
    results.d_mass[local_chunk, row, :] = d_mass
    results.d_values[local_chunk, row, :, :] = d_values
    results.d_planes[local_chunk, row, :, :] = d_planes
    results.d_beta[local_chunk, row] = d_beta


def _key_kernel(*refs: Ref, geometry: Geometry, settings: Settings) -> None:
    """Computes the gradients at the keys of one chunk of one problem."""
    inputs, (query_ref, d_mass_ref, d_values_ref) = Inputs(*refs[:5]), refs[5:8]
    (d_out_ref, weight_ref, d_den_ref), results = refs[8:11], KeyDerivatives(*refs[11:])
    size, query_size = (fit(n, geometry.chunk) for n in (settings.key_tile, settings.query_tile))
    query_tiles = -(-geometry.chunk // query_size)
    program = pl.program_id(0)
    row, chunk = rem(program, geometry.num_rows), div(program, geometry.num_rows)
    hashed = hash_of(inputs, row, geometry)
    scale = 1.0 / geometry.tables.num_tables
    state = chunk if geometry.is_causal else 0

    def tile_step(tile: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        place, rows, tokens = geometry.key_rows(row, chunk, tile, size)
        codes = key_codes(inputs, rows, tokens, hashed, geometry, settings)
        value = take(inputs.value, rows).astype(jnp.float32)
        d_values = d_values_ref[state, row, :, :]
        d_codes = dot(value, d_values, settings=settings, transpose_y=True) + d_mass_ref[state, row, :][None, :]
        d_value = dot(codes.codes, d_values, settings=settings)
        if geometry.is_causal:
            first = div(tile * size, query_size)
            later = query_tiles - first

            def step(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
                d_codes, d_value = state
                query_place, query_rows = geometry.query_rows(
                    row, div(index, later), chunk, first + rem(index, later), query_size
                )
                query = take(query_ref, query_rows)
                query_codes = soft_codes(query, hashed, geometry.tables, settings).codes
                weight = take_numbers(weight_ref, query_rows, 0.0) * scale
                d_num = take(d_out_ref, query_rows).astype(jnp.float32) * weight[:, None]
                d_den = take_numbers(d_den_ref, query_rows, 0.0) * scale
                seen = place[:, None] <= query_place[None, :]
                d_kernel = dot(value, d_num, settings=settings, transpose_y=True) + d_den[None, :]
                kernel = dot(codes.codes, query_codes, settings=settings, transpose_y=True)
                return (
                    d_codes + dot(jnp.where(seen, d_kernel, 0.0), query_codes, settings=settings),
                    d_value + dot(jnp.where(seen, kernel, 0.0), d_num, settings=settings),
                )

            d_codes, d_value = lax.fori_loop(0, later * geometry.group, step, (d_codes, d_value))
        d_key, d_planes, d_beta = derive(codes, d_codes, hashed, geometry.tables, settings)
        put(results.d_key, rows, d_key)
        put(results.d_value, rows, d_value)
        return sums[0] + d_planes, sums[1] + d_beta

    planes = geometry.tables.num_planes, inputs.key.shape[1]
    zeros = jnp.zeros(planes, jnp.float32), jnp.zeros((), jnp.float32)
    d_planes, d_beta = lax.fori_loop(0, -(-geometry.chunk // size), tile_step, zeros)
    results.d_planes[chunk, row, :, :] = d_planes
    results.d_beta[chunk, row] = d_beta
