"""The low-rank branch with the fusion in its readout: the low-rank output is neither written nor read.

out = w_s O_s + w_lr O_lr. Backward, O_lr is not kept either: the kernel that derives at the queries gives d_out . O_lr,
the cotangent of w_lr, as it goes. So w_lr must not depend on Den in a way that is differentiated: that would have to
be known before. `can_fuse` says where all of this holds.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from elsaa_jax import checks, dispatch
from elsaa_jax.arrays.masses import dot_rows, mix
from elsaa_jax.fusion import fusion_weights
from elsaa_jax.low_rank import race, race_kernels, race_xla
from elsaa_jax.low_rank.race import Race
from elsaa_jax.types import Array, BranchOutput, FusionKind
from pallas_kernels.fusion import FUSED_KINDS, FusedKind, Sparse


class Fused(NamedTuple):
    """The static part of a call."""

    race: Race
    kind: FusedKind
    stop_gradient_mass: bool


def can_fuse(static: Race, kind: FusionKind, stop_gradient_mass: bool) -> bool:
    """Whether `fused_race` takes the call, and saves bytes."""
    if kind not in FUSED_KINDS or (kind == "convex" and not stop_gradient_mass):
        return False
    return static.num_ensembles == 1


def fused_race(
    static: Race,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    sparse: BranchOutput,
    *,
    gates: tuple[Array, Array],
    lam: Array,
    num_keys: Array | None,
    beta: float | Array,
    eps: float,
    key_mask: Array | None,
    kind: FusionKind,
    stop_gradient_mass: bool,
) -> tuple[Array, Array]:
    """The fused output (B, T, N, H) and the low-rank log-mass (B, T, N); what was checked is not checked again.

    Args:
      static: of `race.make_race`; see `can_fuse`.
      query: (B, T, N, H).
      key: (B, S, K, H).
      value: (B, S, K, H).
      planes: (L, P, H) or (K, L, P, H).
      sparse: the sparse branch, its mass as the fusion sees it.
      gates: of the sparse and of the low-rank branch, (B, T, N) float32.
      lam: (B, T, N) float32.
      num_keys: (B, T, N) float32, what the low-rank mass is divided by; None: nothing.
      beta: sharpness of the soft codes.
      eps: floor of both denominators.
      key_mask: (B, S).
      kind: of the fusion.
      stop_gradient_mass: whether the masses are constants to the gradient.
    """
    fused = Fused(static, cast(FusedKind, kind), stop_gradient_mass)
    return _fused_race(fused, query, key, value, planes, sparse, gates, lam, num_keys, beta, eps, key_mask)


@functools.partial(jax.jit, static_argnums=0)
def _fused_race(static, query, key, value, planes, sparse, gates, lam, num_keys, beta, eps, key_mask):
    key, value = checks.zero_masked_keys(key_mask, key, value)
    numbers = jnp.asarray(beta, jnp.float32), jnp.asarray(eps, jnp.float32)
    count = 1.0 if num_keys is None else jnp.maximum(num_keys, 1.0)
    arrays = query, key, value, planes, *numbers, key_mask
    out, den = _attend(static, arrays, Sparse(sparse.out, sparse.log_mass, lam / count, *gates))
    return out, race.log_mass_of(den) - jnp.log(count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Fused, arrays: tuple[Array | None, ...], sparse: Sparse) -> tuple[Array, Array]:
    """The fused output, in the query's dtype, and Den (B, T, N)."""
    return _attend_fwd(static, arrays, sparse)[0]


def _attend_fwd(static, arrays, sparse):
    def kernels(arrays, sparse):
        return race_kernels.forward(race.layout_of(static.race), *arrays, sparse, static.kind)

    def xla(arrays, sparse):
        def finish(out, den, *rows):
            return mix(rows[0], out, _weights(static, Sparse(*rows), den, arrays[5]))

        return race_xla.forward(race.layout_of(static.race), *arrays, finish, sparse)

    out, den, state = dispatch.choose(static.race.route, kernels, xla, arrays, sparse)
    return (out, den), (arrays, sparse, den, state)


def _attend_bwd(static, residuals, cotangents):
    arrays, sparse, den, state = residuals
    d_out, d_den = cotangents
    weights, weights_vjp = jax.vjp(functools.partial(_weights, static), sparse, den, arrays[5])
    d_weight = dot_rows(d_out, sparse.out)
    # Only w_s depends on Den: see `can_fuse`.
    d_den = d_den + weights_vjp((d_weight, jnp.zeros_like(d_weight)))[1]

    def kernels(arrays, *rows):
        return race_kernels.backward(race.layout_of(static.race), *arrays, *rows)

    def xla(arrays, *rows):
        return race_xla.backward(race.layout_of(static.race), *arrays, *rows)

    *d_arrays, d_eps, d_low_rank = dispatch.choose(
        static.race.route, kernels, xla, arrays, state, d_out, d_den, weights[1]
    )
    d_sparse, _, d_more_eps = weights_vjp((d_weight, d_low_rank))
    d_sparse = d_sparse._replace(out=(weights[0][..., None] * d_out.astype(jnp.float32)).astype(sparse.out.dtype))
    return (*d_arrays, d_eps + d_more_eps, None), d_sparse


_attend.defvjp(_attend_fwd, _attend_bwd)


def _weights(static: Fused, sparse: Sparse, den: Array, eps: Array) -> tuple[Array, Array]:
    """The weights of both outputs, as the kernel computes them."""
    masses, gates = (sparse.log_mass, race.log_mass_of(den)), (sparse.gate_sparse, sparse.gate_low_rank)
    return fusion_weights(
        masses, gates, sparse.lam, eps=eps, kind=static.kind, stop_gradient_mass=static.stop_gradient_mass
    )
