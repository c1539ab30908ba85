"""RACE by the kernels of `pallas_kernels`, one ensemble after another. `race_xla` is the same in XLA."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from elsaa_jax.arrays.chunks import pad_axis
from elsaa_jax.low_rank.call import RaceArrays, RaceCall, State
from elsaa_jax.types import Array
from pallas_kernels import race, race_backward
from pallas_kernels.configs import settings_for
from pallas_kernels.fusion import Sparse
from pallas_kernels.race import Geometry, Inputs
from pallas_kernels.soft_codes import DEN_SCALE, Tables

# Tokens that one program sums over in non-causal attention, where the chunk is no part of the algorithm.
FULL_CHUNK = 512


def forward(call: RaceCall, arrays: RaceArrays, sparse: Sparse | None) -> tuple[Array, Array, State]:
    """Computes the output (B, T, N, H), in the dtype of the query, DEN_SCALE times Den (B, T, N), and the state.

    With a sparse branch of arrays (B, T, N, ...), the output is the fused one; there must be one ensemble then.
    """
    query, query_rows = arrays.query, arrays.query.reshape(-1, arrays.query.shape[-1])
    if sparse is not None:
        sparse = Sparse(*(x.reshape(-1, *x.shape[3:]) for x in sparse))
    geometry = _geometry(call, arrays)
    dtype = query.dtype if call.num_ensembles == 1 else jnp.float32
    outs, dens, states = [], [], []
    for ensemble in range(call.num_ensembles):
        inputs = _inputs(geometry, ensemble, arrays)
        sums = race.summary(inputs, geometry, settings_for("race_summary", query, *call.route[1:]))
        state = State(*(_before(x, geometry) for x in sums))
        settings = settings_for("race_readout", query, *call.route[1:])
        kind = call.fusion or "elsaa"
        out, den = race.readout(inputs, query_rows, *state, dtype, geometry, settings, sparse, kind)
        outs.append(out)
        dens.append(den)
        states.append(state)
    out, den = (_sum(x) / len(x) for x in (outs, dens))
    return out.astype(query.dtype).reshape(query.shape), den.reshape(query.shape[:3]), _join(states, call, geometry)


def backward(
    call: RaceCall, arrays: RaceArrays, state: State, d_out: Array, d_den: Array, out_weight: Array | None
) -> tuple[RaceArrays, Array | None]:
    """Computes the derivatives of `forward` with respect to its arrays.

    Args:
      call: Static facts.
      arrays: Arrays of the call.
      state: State that `forward` returned.
      d_out: Cotangent of the output, or of out_weight times the output.
      d_den: Cotangent of DEN_SCALE times Den.
      out_weight: Weight of the output in a fusion, (B, T, N), or None. With it there must be one ensemble.

    Returns:
      The derivatives of the arrays, and d_out . out (B, T, N) if there is an `out_weight`.
    """
    query, query_rows = arrays.query, arrays.query.reshape(-1, arrays.query.shape[-1])
    weight = None if out_weight is None else out_weight.reshape(-1)
    geometry = _geometry(call, arrays)
    d_out, d_den = d_out.reshape(-1, d_out.shape[-1]) / call.num_ensembles, d_den.reshape(-1) / call.num_ensembles
    results = []
    for ensemble, part in enumerate(_split(state, geometry)):
        inputs = _inputs(geometry, ensemble, arrays)
        settings = settings_for("race_backward_query", query, *call.route[1:])
        of_query = race_backward.backward_query(inputs, query_rows, *part, d_out, d_den, geometry, settings, weight)
        d_sums = _before_vjp(of_query.d_mass, geometry), _before_vjp(of_query.d_values, geometry)
        settings = settings_for("race_backward_key", query, *call.route[1:])
        rows = query_rows, *d_sums, d_out, of_query.weight, of_query.d_den
        of_key = race_backward.backward_key(inputs, *rows, geometry, settings)
        d_planes = _sum_planes(of_query.d_planes, geometry) + _sum_planes(of_key.d_planes, geometry)
        d_beta = jnp.sum(of_query.d_beta) + jnp.sum(of_key.d_beta)
        d_eps = jnp.sum(of_query.d_den - d_den) * DEN_SCALE
        results.append((of_query.d_query, of_key.d_key, of_key.d_value, d_planes, d_beta, d_eps, of_query.d_weight))
    d_query, d_key, d_value = (_sum([r[i] for r in results]).reshape(x.shape) for i, x in enumerate(arrays[:3]))
    d_planes = jnp.concatenate([r[3] for r in results], axis=-3).astype(arrays.planes.dtype)
    d_beta, d_eps = (_sum([r[i] for r in results]) for i in (4, 5))
    d_weight = None if out_weight is None else results[0][6].reshape(out_weight.shape)
    return RaceArrays(d_query, d_key, d_value, d_planes, d_beta, d_eps, None), d_weight


def _geometry(call: RaceCall, arrays: RaceArrays) -> Geometry:
    """Returns the geometry of one ensemble."""
    num_queries, num_keys, num_heads, num_kv_heads = call.facts[:4]
    chunk = call.causal_chunk or min(FULL_CHUNK, max(num_queries, num_keys))
    sizes = arrays.query.shape[0], num_queries, num_keys, num_heads, num_kv_heads
    masked, shared_planes = arrays.key_mask is not None, arrays.planes.ndim == 3
    tables = Tables(call.num_tables, call.num_bits)
    return Geometry(*sizes, tables, chunk, call.facts.is_causal, masked, shared_planes)


def _inputs(geometry: Geometry, ensemble: int, arrays: RaceArrays) -> Inputs:
    tables = geometry.tables
    planes = arrays.planes.astype(jnp.float32).reshape(-1, *arrays.planes.shape[-3:])
    planes = planes[:, ensemble * tables.num_tables : (ensemble + 1) * tables.num_tables]
    planes = planes.reshape(len(planes), -1, planes.shape[-1])
    planes = pad_axis(planes, 1, 0, tables.num_planes - planes.shape[1])
    mask = jnp.zeros((1,), jnp.int8) if arrays.key_mask is None else arrays.key_mask.reshape(-1).astype(jnp.int8)
    numbers = jnp.stack([arrays.beta, arrays.eps * DEN_SCALE])
    width = planes.shape[-1]
    return Inputs(arrays.key.reshape(-1, width), arrays.value.reshape(-1, width), planes, numbers, mask)


def _before(sums: Array, geometry: Geometry) -> Array:
    """Sums over the chunks before each chunk with a query; if not causal, over all chunks, (1, ...)."""
    if not geometry.is_causal:
        return jnp.sum(sums, axis=0, keepdims=True)
    return pad_axis(lax.associative_scan(jnp.add, sums), 0, 1, 0)[geometry.first_chunk : -1]


def _before_vjp(d_before: Array, geometry: Geometry) -> Array:
    """Computes the transpose of `_before`: the queries of all later chunks read a chunk."""
    if not geometry.is_causal:
        return jnp.sum(d_before, axis=0, keepdims=True)
    after = lax.associative_scan(jnp.add, d_before, reverse=True)
    after = pad_axis(after[1:], 0, 0, 1)
    head = jnp.broadcast_to(d_before.sum(0, keepdims=True), (geometry.first_chunk, *d_before.shape[1:]))
    return jnp.concatenate([head, after], axis=0)


def _join(states: list[State], call: RaceCall, geometry: Geometry) -> State:
    """Joins the states of the ensembles, (chunks, R, F, ...), to (*chunks, R, M, F, ...) without padding."""
    features = call.num_tables << call.num_bits
    mass = jnp.stack([x.mass for x in states], axis=2)[:, :, :, :features]
    values = jnp.stack([x.values for x in states], axis=2)[:, :, :, :features]
    return State(mass, values) if geometry.is_causal else State(mass[0], values[0])


def _split(state: State, geometry: Geometry) -> list[State]:
    """Undoes `_join`."""
    mass, values = state if geometry.is_causal else (state.mass[None], state.values[None])
    extra = geometry.tables.num_features - mass.shape[3]
    mass, values = pad_axis(mass, 3, 0, extra), pad_axis(values, 3, 0, extra)
    return [State(mass[:, :, m], values[:, :, m]) for m in range(mass.shape[2])]


def _sum_planes(d_planes: Array, geometry: Geometry) -> Array:
    """Sums partial sums (chunks, R, planes, H) to (L, P, H) or (K, L, P, H)."""
    tables = geometry.tables
    d_planes = d_planes.reshape(-1, geometry.num_kv_heads, *d_planes.shape[2:]).sum(0)
    d_planes = d_planes[:, : tables.num_tables * tables.num_bits]
    d_planes = d_planes.reshape(-1, tables.num_tables, tables.num_bits, d_planes.shape[-1])
    return d_planes.sum(0) if geometry.shared_planes else d_planes


def _sum(arrays: list[Array]) -> Array:
    return functools.reduce(jnp.add, arrays)
