"""The low-rank branch: RACE attention, soft hash buckets in linear time (Alg. 2 and 3 of the paper).

One custom VJP serves the branch alone and its fusion with the sparse branch. In the fused form the readout writes
out = w_s O_s + w_lr O_lr, so the low-rank output O_lr is neither written nor read. Its backward pass does not have
O_lr either: the derivative at the queries yields d_out . O_lr, the cotangent of w_lr, on its way. So w_lr must not
depend on Den in a way that is differentiated; `with_fusion` says which calls qualify.
"""

from __future__ import annotations

import functools
from typing import cast

import jax
import jax.numpy as jnp

from elsaa_jax import dispatch
from elsaa_jax.arrays.guards import first_order_only, guard_inputs, reverse_only
from elsaa_jax.arrays.masses import dot_rows
from elsaa_jax.checks import check_call, check_int, check_race_planes, check_scalar
from elsaa_jax.config import MAX_SOFT_BITS
from elsaa_jax.low_rank import race_kernels, race_xla
from elsaa_jax.low_rank.call import RaceArrays, RaceCall, State
from elsaa_jax.types import Array, BranchOutput, CallFacts, FusionKind, Implementation
from pallas_kernels.configs import race_refusal
from pallas_kernels.fusion import FUSED_KINDS, FusedKind, Sparse


def race_attention(
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    *,
    beta: float | Array = 1.0,
    num_ensembles: int = 1,
    is_causal: bool = False,
    key_mask: Array | None = None,
    chunk_size: int = 256,
    eps: float = 1e-6,
    implementation: Implementation | None = None,
) -> BranchOutput:
    """Attends with the kernel (1/L) sum_l phi_l(q) . phi_l(k), where phi_l are the soft codes of table l.

    Den = sum_j kernel(q, k_j), Num = sum_j kernel(q, k_j) v_j, out = Num / (Den + eps) and log_mass = log Den. With M
    ensembles the outputs are averaged, and log_mass is the logarithm of the mean Den. The causal form sums over the
    chunks before a query's own by a prefix sum of chunk summaries, and over its own chunk by a masked product.

    Args:
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      planes: Hash planes, (M*L, P, H), or (K, M*L, P, H) with one set for each key/value head. The tables of an
        ensemble stand together.
      beta: Sharpness of the soft codes, a scalar that may be traced.
      num_ensembles: M.
      is_causal: Whether query i, at position S - T + i, attends to positions up to its own only.
      key_mask: Keys that take part, (B, S) bool, True = attend.
      chunk_size: Tokens of a chunk of the causal form, C.
      eps: Floor of the denominator.
      implementation: "xla", "pallas" or "interpret"; by default the best for each platform (`elsaa_jax.dispatch`).

    Returns:
      The output (B, T, N, H) and the log-mass (B, T, N).

    Example:
      >>> import jax
      >>> from elsaa_jax import race_attention, sample_planes
      >>> x = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))
      >>> planes = sample_planes(jax.random.key(1), (4, 3, 16))  # 4 tables of 3 bits
      >>> out, log_mass = race_attention(x, x, x, planes, is_causal=True)
      >>> out.shape, log_mass.shape
      ((1, 64, 2, 16), (1, 64, 2))
    """
    facts = check_call(query, key, value, is_causal=is_causal, key_mask=key_mask)
    check_scalar("beta", beta, positive=True)
    check_scalar("eps", eps)
    check_int("chunk_size", chunk_size, 1)
    check_race_planes("planes", planes, facts, num_ensembles, MAX_SOFT_BITS)
    tables, bits = planes.shape[-3] // num_ensembles, planes.shape[-2]
    refusal = race_refusal(query, key, tables, bits, min(chunk_size, facts.num_keys) if is_causal else None)
    call = make_race(facts, planes, num_ensembles, chunk_size, dispatch.route(implementation, refusal))
    return _race(call, query, key, value, planes, beta, key_mask, eps)


def make_race(facts: CallFacts, planes: Array, num_ensembles: int, chunk_size: int, route: dispatch.Route) -> RaceCall:
    """Returns the static facts of a call with checked planes, without a fusion."""
    tables, bits = planes.shape[-3:-1]
    chunk = min(chunk_size, facts.num_keys) if facts.is_causal else None
    return RaceCall(facts, tables // num_ensembles, bits, num_ensembles, chunk, route)


@functools.partial(jax.jit, static_argnums=0)
def _race(
    call: RaceCall,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: float | Array,
    key_mask: Array | None,
    eps: float | Array,
) -> BranchOutput:
    query, key, value = guard_inputs(query, key, value, None, key_mask)
    return race_branch(call, make_arrays(query, key, value, planes, beta, eps, key_mask))


def make_arrays(
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: float | Array,
    eps: float | Array,
    key_mask: Array | None,
) -> RaceArrays:
    """Packs the arrays of a call, in which masked tokens are 0."""
    return RaceArrays(
        query, key, value, planes, jnp.asarray(beta, jnp.float32), jnp.asarray(eps, jnp.float32), key_mask
    )


def race_branch(call: RaceCall, arrays: RaceArrays) -> BranchOutput:
    """Computes the low-rank branch."""
    out, den = _attend(call, reverse_only(arrays), None)
    return BranchOutput(out, race_xla.log_mass_of(den))


def with_fusion(call: RaceCall, kind: FusionKind, stop_gradient_mass: bool) -> RaceCall:
    """Adds the fusion to the readout of a call, which saves memory traffic, if the readout can compute it."""
    fits = kind in FUSED_KINDS and (kind != "convex" or stop_gradient_mass) and call.num_ensembles == 1
    return call._replace(fusion=cast(FusedKind, kind), stop_gradient_mass=stop_gradient_mass) if fits else call


def fused_race(call: RaceCall, arrays: RaceArrays, sparse: Sparse) -> tuple[Array, Array]:
    """Computes the fused output (B, T, N, H) and the low-rank log-mass (B, T, N).

    Args:
      call: Static facts, with the kind of fusion, as `with_fusion` returns them.
      arrays: Arrays of the low-rank branch.
      sparse: Sparse branch, lambda and gates, (B, T, N, ...) each.
    """
    out, den = _attend(call, reverse_only(arrays), reverse_only(sparse))
    return out, race_xla.log_mass_of(den)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: RaceCall, arrays: RaceArrays, sparse: Sparse | None) -> tuple[Array, Array]:
    """Returns the output, in the dtype of the query, and DEN_SCALE times Den (B, T, N)."""
    return _forward(call, arrays, sparse)[:2]


def _forward(call: RaceCall, arrays: RaceArrays, sparse: Sparse | None) -> tuple[Array, Array, State]:
    kernels, xla = functools.partial(race_kernels.forward, call), functools.partial(race_xla.forward, call)
    return dispatch.choose(call.route, kernels, xla, arrays, sparse)


Residuals = tuple[RaceArrays, Sparse | None, Array, State]


def _attend_fwd(call: RaceCall, arrays: RaceArrays, sparse: Sparse | None) -> tuple[tuple[Array, Array], Residuals]:
    # The guarded arrays are not kept for the backward pass: they would be copies of the inputs.
    out, den, state = _forward(call, *first_order_only((arrays, sparse)))
    return (out, den), (arrays, sparse, den, state)


def _attend_bwd(
    call: RaceCall, residuals: Residuals, cotangents: tuple[Array, Array]
) -> tuple[RaceArrays, Sparse | None]:
    arrays, sparse, den, state = residuals
    d_out, d_den = first_order_only(cotangents)
    kernels, xla = functools.partial(race_kernels.backward, call), functools.partial(race_xla.backward, call)
    if sparse is None:
        d_arrays, _ = dispatch.choose(call.route, kernels, xla, arrays, state, d_out, d_den, None)
        return d_arrays, None
    weights, weights_vjp = jax.vjp(functools.partial(race_xla.fused_weights, call), sparse, den, arrays.eps)
    d_weight = dot_rows(d_out, sparse.out)
    # Only w_s depends on Den: see `with_fusion`.
    d_den = d_den + weights_vjp((d_weight, jnp.zeros_like(d_weight)))[1]
    d_arrays, d_low_rank = dispatch.choose(call.route, kernels, xla, arrays, state, d_out, d_den, weights[1])
    d_sparse, _, d_eps = weights_vjp((d_weight, d_low_rank))
    d_sparse = d_sparse._replace(out=(weights[0][..., None] * d_out.astype(jnp.float32)).astype(sparse.out.dtype))
    return d_arrays._replace(eps=d_arrays.eps + d_eps), d_sparse


_attend.defvjp(_attend_fwd, _attend_bwd)
