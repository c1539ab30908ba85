"""The low-rank branch by the RACE kernels of `pallas_kernels`, ensemble after ensemble."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from elsaa_jax.arrays.chunks import flatten, pad_axis
from elsaa_jax.types import Array
from pallas_kernels import race, race_backward
from pallas_kernels.configs import Arithmetic, Settings, settings_of
from pallas_kernels.fusion import FusedKind, Sparse
from pallas_kernels.race import Geometry, Inputs
from pallas_kernels.soft_codes import Tables

# Tokens that one program sums over where attention is not causal and the chunk is no part of the algorithm.
FULL_CHUNK = 512


class Layout(NamedTuple):
    """The static part of a call: chunk of the causal form or None, M, compute capability, arithmetic."""

    causal_chunk: int | None
    num_ensembles: int
    target: int
    arithmetic: Arithmetic

    def settings(self, kernel: str, x: Array) -> Settings:
        """The settings of a kernel for arrays like `x`."""
        return settings_of(kernel, x.dtype.name, x.shape[-1], self.target)._replace(arithmetic=self.arithmetic)

    def geometry(self, query: Array, key: Array, planes: Array, masked: bool) -> Geometry:
        """The geometry of one ensemble."""
        batch, num_queries, num_heads, _ = query.shape
        tables = Tables(planes.shape[-3] // self.num_ensembles, planes.shape[-2])
        causal = self.causal_chunk is not None
        chunk = min(self.causal_chunk or FULL_CHUNK, key.shape[1] if causal else max(num_queries, key.shape[1]))
        sizes = batch, num_queries, key.shape[1], num_heads, key.shape[2]
        return Geometry(*sizes, tables, chunk, causal, masked, planes.ndim == 3)


class State(NamedTuple):
    """What queries read: bucket masses (*chunks, R, M, F) and bucket values (*chunks, R, M, F, H).

    Where causal, of all chunks before each chunk with a query; else, without the axis of chunks, of all keys.
    """

    mass: Array
    values: Array


def forward(
    layout: Layout,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: Array,
    eps: Array,
    key_mask: Array | None,
    sparse: Sparse | None = None,
    kind: FusedKind = "elsaa",
) -> tuple[Array, Array, State]:
    """out (B, T, N, H), in the query's dtype, Den (B, T, N) and the state; arguments as of `race_attention`.

    With a sparse branch of arrays (B, T, N, ...), out is the fused output; there must be one ensemble then.
    """
    if sparse is not None:
        sparse = Sparse(*(flatten(x) for x in sparse))
    geometry = layout.geometry(query, key, planes, key_mask is not None)
    dtype = query.dtype if layout.num_ensembles == 1 else jnp.float32
    outs, dens, states = [], [], []
    for ensemble in range(layout.num_ensembles):
        inputs = _inputs(geometry, ensemble, key, value, planes, beta, eps, key_mask)
        sums = race.summary(inputs, geometry, layout.settings("race_summary", query))
        state = State(*(_before(x, geometry) for x in sums))
        settings = layout.settings("race_readout", query)
        out, den = race.readout(inputs, flatten(query), *state, dtype, geometry, settings, sparse, kind)
        outs.append(out)
        dens.append(den)
        states.append(state)
    out, den = (_sum(x) / len(x) for x in (outs, dens))
    return out.astype(query.dtype).reshape(query.shape), den.reshape(query.shape[:3]), _join(states, geometry, planes)


def backward(
    layout: Layout,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: Array,
    eps: Array,
    key_mask: Array | None,
    state: State,
    d_out: Array,
    d_den: Array,
    out_weight: Array | None = None,
) -> tuple[Array, ...]:
    """d_query, d_key, d_value, d_planes, d_beta and d_eps, from the cotangents of out and Den.

    With `out_weight` (B, T, N), `d_out` is the cotangent of out_weight out, and d_out . out (B, T, N) comes last;
    there must be one ensemble then.
    """
    weight = None if out_weight is None else out_weight.reshape(-1)
    geometry = layout.geometry(query, key, planes, key_mask is not None)
    d_out, d_den = flatten(d_out) / layout.num_ensembles, d_den.reshape(-1) / layout.num_ensembles
    results = []
    for ensemble, part in enumerate(_split(state, geometry)):
        inputs = _inputs(geometry, ensemble, key, value, planes, beta, eps, key_mask)
        settings = layout.settings("race_backward_query", query)
        of_query = race_backward.backward_query(inputs, flatten(query), *part, d_out, d_den, geometry, settings, weight)
        d_sums = _before_vjp(of_query.d_mass, geometry), _before_vjp(of_query.d_values, geometry)
        settings = layout.settings("race_backward_key", query)
        rows = flatten(query), *d_sums, d_out, of_query.weight, of_query.d_den
        of_key = race_backward.backward_key(inputs, *rows, geometry, settings)
        d_planes = _sum_planes(of_query.d_planes, geometry) + _sum_planes(of_key.d_planes, geometry)
        d_beta = jnp.sum(of_query.d_beta) + jnp.sum(of_key.d_beta)
        d_eps = jnp.sum(of_query.d_den - d_den)
        results.append((of_query.d_query, of_key.d_key, of_key.d_value, d_planes, d_beta, d_eps, of_query.d_weight))
    d_query, d_key, d_value = (
        _sum([r[i] for r in results]).reshape(x.shape) for i, x in enumerate((query, key, value))
    )
    d_planes = jnp.concatenate([r[3] for r in results], axis=-3).astype(planes.dtype)
    derivatives = d_query, d_key, d_value, d_planes, _sum([r[4] for r in results]), _sum([r[5] for r in results])
    return derivatives if out_weight is None else (*derivatives, results[0][6].reshape(out_weight.shape))


def _inputs(
    geometry: Geometry,
    ensemble: int,
    key: Array,
    value: Array,
    planes: Array,
    beta: Array,
    eps: Array,
    key_mask: Array | None,
) -> Inputs:
    tables = geometry.tables
    planes = planes.astype(jnp.float32).reshape(-1, *planes.shape[-3:])
    planes = planes[:, ensemble * tables.num_tables : (ensemble + 1) * tables.num_tables]
    planes = planes.reshape(len(planes), -1, planes.shape[-1])
    planes = pad_axis(planes, 1, 0, tables.num_planes - planes.shape[1])
    mask = jnp.zeros((1,), jnp.int8) if key_mask is None else key_mask.reshape(-1).astype(jnp.int8)
    return Inputs(flatten(key), flatten(value), planes, jnp.stack([beta, eps]), mask)


def _before(sums: Array, geometry: Geometry) -> Array:
    """Sums of chunks (chunks, ...) -> of the chunks before each chunk with a query; not causal: (1, ...) of all."""
    if not geometry.is_causal:
        return jnp.sum(sums, axis=0, keepdims=True)
    return pad_axis(lax.associative_scan(jnp.add, sums), 0, 1, 0)[geometry.first_chunk : -1]


def _before_vjp(d_before: Array, geometry: Geometry) -> Array:
    """The transpose of `_before`: a chunk is read by the queries of all chunks after it."""
    if not geometry.is_causal:
        return jnp.sum(d_before, axis=0, keepdims=True)
    after = lax.associative_scan(jnp.add, d_before, reverse=True)
    after = pad_axis(after[1:], 0, 0, 1)
    head = jnp.broadcast_to(d_before.sum(0, keepdims=True), (geometry.first_chunk, *d_before.shape[1:]))
    return jnp.concatenate([head, after], axis=0)


def _join(states: list[State], geometry: Geometry, planes: Array) -> State:
    """States of the ensembles, (chunks, R, F, ...) -> (*chunks, R, M, F, ...) without padding."""
    features = geometry.tables.num_tables << planes.shape[-2]
    mass = jnp.stack([x.mass for x in states], axis=2)[:, :, :, :features]
    values = jnp.stack([x.values for x in states], axis=2)[:, :, :, :features]
    return State(mass, values) if geometry.is_causal else State(mass[0], values[0])


def _split(state: State, geometry: Geometry) -> list[State]:
    """The inverse of `_join`."""
    mass, values = state if geometry.is_causal else (state.mass[None], state.values[None])
    extra = geometry.tables.num_features - mass.shape[3]
    mass, values = pad_axis(mass, 3, 0, extra), pad_axis(values, 3, 0, extra)
    return [State(mass[:, :, m], values[:, :, m]) for m in range(mass.shape[2])]


def _sum_planes(d_planes: Array, geometry: Geometry) -> Array:
    """Partial sums (chunks, R, planes, H) -> (L, P, H) or (K, L, P, H)."""
    tables = geometry.tables
    d_planes = d_planes.reshape(-1, geometry.num_kv_heads, *d_planes.shape[2:]).sum(0)
    d_planes = d_planes[:, : tables.num_tables * tables.num_bits]
    d_planes = d_planes.reshape(-1, tables.num_tables, tables.num_bits, d_planes.shape[-1])
    return d_planes.sum(0) if geometry.shared_planes else d_planes


def _sum(arrays: list[Array]) -> Array:
    return functools.reduce(jnp.add, arrays)
