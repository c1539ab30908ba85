"""The low-rank branch: RACE attention, soft hash buckets in linear time (Alg. 2 and 3 of the paper)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax import checks, dispatch
from elsaa_jax.arrays.masses import safe_log
from elsaa_jax.checks import check_int
from elsaa_jax.config import MAX_SOFT_BITS
from elsaa_jax.low_rank import race_kernels, race_xla
from elsaa_jax.types import Array, BranchOutput, Implementation
from pallas_kernels.configs import race_refusal

# Below this, 1 / Den would overflow in the derivative of log Den.
TINY_MASS = 1e-30


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
    """Attention with the kernel (1/L) sum_l phi_l(q) . phi_l(k), phi_l the soft codes of table l.

    Den = sum_j kernel(q, k_j), Num = sum_j kernel(q, k_j) v_j, out = Num / (Den + eps), and
    log_mass = log Den. With M ensembles the outputs are averaged, and log_mass is the logarithm
    of the mean Den. The causal form sums over chunks before a query's own by a prefix sum of
    chunk summaries, and over its own chunk by a masked product.

    Args:
      query: (B, T, N, H).
      key: (B, S, K, H).
      value: (B, S, K, H).
      planes: (M*L, P, H), or (K, M*L, P, H) with one set for each key/value head; the tables of
        an ensemble stand together.
      beta: sharpness of the soft codes, a scalar, may be traced.
      num_ensembles: M.
      is_causal: query i is the (S - T + i)-th position and attends to positions up to its own.
      key_mask: (B, S) bool, True = attend.
      chunk_size: C of the causal form.
      eps: floor of the denominator.
      implementation: see `elsaa_jax.dispatch`.

    Returns:
      out (B, T, N, H) and log_mass (B, T, N).
    """
    checks.check_qkv(query, key, value, is_causal)
    checks.check_mask("key_mask", key_mask, key.shape[0], key.shape[1])
    checks.check_scalar("beta", beta, positive=True)
    checks.check_scalar("eps", eps)
    static = make_race(query, key, planes, num_ensembles, is_causal, chunk_size, implementation)
    return _race(static, query, key, value, planes, beta, key_mask, eps)


class Race(NamedTuple):
    """The static part of a call."""

    causal_chunk: int | None
    num_ensembles: int
    route: dispatch.Route


def make_race(
    query: Array,
    key: Array,
    planes: Array,
    num_ensembles: int,
    is_causal: bool,
    chunk_size: int,
    implementation: Implementation | None,
) -> Race:
    """The static part of a call, after a check of the planes; arguments as of `race_attention`."""
    _check_planes(planes, key, num_ensembles)
    check_int("chunk_size", chunk_size, 1)
    tables = jnp.shape(planes)[-3] // num_ensembles
    chunk = min(chunk_size, key.shape[1]) if is_causal else None
    route = dispatch.route(implementation, race_refusal(query, key, tables, jnp.shape(planes)[-2], chunk))
    return Race(chunk, num_ensembles, route)


@functools.partial(jax.jit, static_argnums=0)
def _race(
    static: Race,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: float | Array,
    key_mask: Array | None,
    eps: float | Array,
) -> BranchOutput:
    key, value = checks.zero_masked_keys(key_mask, key, value)
    numbers = jnp.asarray(beta, jnp.float32), jnp.asarray(eps, jnp.float32)
    out, den = _attend(static, query, key, value, planes, *numbers, key_mask)
    return BranchOutput(out, log_mass_of(den))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: Race,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: Array,
    eps: Array,
    key_mask: Array | None,
) -> tuple[Array, Array]:
    """out (B, T, N, H), in the query's dtype, and Den (B, T, N)."""
    return _attend_fwd(static, query, key, value, planes, beta, eps, key_mask)[0]


def _attend_fwd(static, *arrays):
    kernels, xla = (functools.partial(module.forward, layout_of(static)) for module in (race_kernels, race_xla))
    out, den, state = dispatch.choose(static.route, kernels, xla, *arrays)
    return (out, den), (arrays, state)


def _attend_bwd(static, residuals, cotangents):
    arrays, state = residuals
    kernels, xla = (functools.partial(module.backward, layout_of(static)) for module in (race_kernels, race_xla))
    return *dispatch.choose(static.route, kernels, xla, *arrays, state, *cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def layout_of(static: Race) -> race_kernels.Layout:
    """How `race_kernels` and `race_xla` lay it out."""
    route = static.route
    return race_kernels.Layout(static.causal_chunk, static.num_ensembles, route.target, route.arithmetic)


def _check_planes(planes: Array, key: Array, num_ensembles: int) -> None:
    check_int("num_ensembles", num_ensembles, 1)
    num_kv_heads, head_dim = key.shape[2:]
    shape = jnp.shape(planes)
    shared = len(shape) == 3
    if not (shared or (len(shape) == 4 and shape[0] == num_kv_heads)) or shape[-1] != head_dim:
        raise ValueError(
            f"planes has shape {shape}; it must be (tables, bits, {head_dim}), or ({num_kv_heads}, tables, bits, "
            f"{head_dim}) with one set for each key/value head"
        )
    check_int("the number of bits of the planes", shape[-2], 1, MAX_SOFT_BITS)
    if shape[-3] == 0 or shape[-3] % num_ensembles:
        raise ValueError(f"num_ensembles is {num_ensembles}; it must divide the {shape[-3]} tables of the planes")


def log_mass_of(den: Array) -> Array:
    """log Den, -inf and without derivative where it is 0; elsewhere the derivative is at most 1 / TINY_MASS."""
    bounded = jnp.log(jnp.maximum(den, TINY_MASS))
    return jnp.where(den > 0, bounded + lax.stop_gradient(safe_log(den) - bounded), -jnp.inf)
