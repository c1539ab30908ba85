"""RACE backward: one kernel for what queries did, one for what keys did.

With X = sum over what a query reads of (d_out . value) x code and Y = the same of the codes alone,
Den = codes . Y / L, d_out . Num = codes . X / L and d_codes = (w X + d_Den Y) / L, w = 1 / (Den +
eps): one pass over the keys gives both, and nothing of the forward pass is kept but the summaries.

A program owns a chunk: its query rows or key rows, its cotangents of the buckets, and its partial
sums of d_planes and d_beta, which are added up outside. So no two programs write one address.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.configs import Settings, fit
from pallas_kernels.launch import Array, Ref, call, div, dot, put, put_numbers, rem, take, take_numbers
from pallas_kernels.race import Geometry, Inputs, hash_of, key_codes, last_tile
from pallas_kernels.soft_codes import derive, soft_codes


class QueryDerivatives(NamedTuple):
    """What the kernel of the queries returns, float32 but d_query.

    Attributes:
      d_query: (B*T*N, H).
      weight: (B*T*N), w = 1 / (Den + eps), times the weight of out where there is one: d_Num = w d_out.
      d_den: (B*T*N), the whole cotangent of Den.
      d_mass: (query chunks, R, F), of what the queries of each chunk read.
      d_values: (query chunks, R, F, H).
      d_planes: (query chunks, R, planes, H).
      d_beta: (query chunks, R).
      d_weight: (B*T*N), d_out . out, the cotangent of the weight of out where there is one; else (1,), not written.
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
    """What the kernel of the keys returns: (B*S*K, H) twice, (chunks, R, planes, H) and (chunks, R)."""

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
    """Derivatives at the queries; see `race.readout`.

    Args:
      inputs: keys, planes and numbers.
      query: (B*T*N, H).
      mass: what was read.
      values: what was read.
      d_out: (B*T*N, H), the cotangent of out, or of out_weight out.
      d_den: (B*T*N), the cotangent of Den.
      geometry: what is static.
      settings: of the kernel "race_backward_query".
      out_weight: (B*T*N) float32, what out was multiplied by; None: nothing.
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
    """Derivatives at the keys.

    Args:
      inputs: keys, planes and numbers.
      query: (B*T*N, H).
      d_mass: (chunks, R, F), the cotangent of the summary of each chunk; (1, R, F) where not causal.
      d_values: (chunks, R, F, H), or (1, R, F, H).
      d_out: (B*T*N, H).
      weight: (B*T*N), of `backward_query`.
      d_den: (B*T*N), of `backward_query`.
      geometry: what is static.
      settings: of the kernel "race_backward_key".
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

    def tile_step(index, sums):
        tile, head = rem(index, tiles), div(index, tiles)
        place, rows = geometry.query_rows(row, head, chunk, tile, size)
        codes = soft_codes(take(query_ref, rows), hashed, geometry.tables, settings)
        d_out = take(d_out_ref, rows).astype(jnp.float32)
        values = dot(d_out, values_ref[state, row, :, :], settings=settings, transpose_y=True)
        mass = jnp.broadcast_to(mass_ref[state, row, :][None, :], values.shape)
        if geometry.is_causal:

            def step(key_tile, state):
                values, mass = state
                key_place, key_rows, tokens = geometry.key_rows(row, chunk, key_tile, key_size)
                past = key_codes(inputs, key_rows, tokens, hashed, geometry, settings).codes
                value = take(inputs.value, key_rows).astype(jnp.float32)
                seen = key_place[None, :] <= place[:, None]
                of_values = jnp.where(seen, dot(d_out, value, settings=settings, transpose_y=True), 0.0)
                of_mass = jnp.where(seen, 1.0, 0.0)
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
    inputs, (query_ref, d_mass_ref, d_values_ref) = Inputs(*refs[:5]), refs[5:8]
    (d_out_ref, weight_ref, d_den_ref), results = refs[8:11], KeyDerivatives(*refs[11:])
    size, query_size = (fit(n, geometry.chunk) for n in (settings.key_tile, settings.query_tile))
    query_tiles = -(-geometry.chunk // query_size)
    program = pl.program_id(0)
    row, chunk = rem(program, geometry.num_rows), div(program, geometry.num_rows)
    hashed = hash_of(inputs, row, geometry)
    scale = 1.0 / geometry.tables.num_tables
    state = chunk if geometry.is_causal else 0

    def tile_step(tile, sums):
        place, rows, tokens = geometry.key_rows(row, chunk, tile, size)
        codes = key_codes(inputs, rows, tokens, hashed, geometry, settings)
        value = take(inputs.value, rows).astype(jnp.float32)
        d_values = d_values_ref[state, row, :, :]
        d_codes = dot(value, d_values, settings=settings, transpose_y=True) + d_mass_ref[state, row, :][None, :]
        d_value = dot(codes.codes, d_values, settings=settings)
        if geometry.is_causal:
            first = div(tile * size, query_size)
            later = query_tiles - first

            def step(index, state):
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
