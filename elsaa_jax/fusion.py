"""Fusing branches by their masses: log-sum-exp merge and the denominator-aware multiplier."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from elsaa_jax import checks
from elsaa_jax.arrays.masses import log_sum, mix, safe_log, softmax_pair
from elsaa_jax.checks import check_bool, check_choice
from elsaa_jax.config import FUSION_KINDS
from elsaa_jax.types import Array, BranchOutput, FusionKind


def merge(first: BranchOutput, second: BranchOutput) -> BranchOutput:
    """MergeLSE of Alg. 5: the attention over two disjoint sets of keys from that over each.

    log_mass = log(exp(l_1) + exp(l_2)), out the mean of the outputs with weights exp(l_k). Two
    rows without keys give out 0 and log_mass -inf, with gradient 0.
    """
    _check_branches(first, second, "first", "second")
    weights, log_mass = softmax_pair(first.log_mass, second.log_mass)
    out = mix(first.out, second.out, weights)
    return BranchOutput(out.astype(first.out.dtype), log_mass)


def sparse_multiplier(
    sparse_log_mass: Array, low_rank_log_mass: Array, *, lam: float | Array = 1.0, eps: float | Array = 1e-6
) -> Array:
    """m = d_sparse / (d_sparse + lam d_lr + eps), Eq. 5, in log space; 0 where the sparse branch has no key.

    Args:
      sparse_log_mass: (B, T, N), log d_sparse.
      low_rank_log_mass: (B, T, N), log d_lr.
      lam: lambda >= 0, broadcast to (B, T, N).
      eps: floor of the denominator.
    """
    shape = sparse_log_mass.shape
    if low_rank_log_mass.shape != shape:
        raise ValueError(
            f"low_rank_log_mass has shape {low_rank_log_mass.shape}; it must be {shape}, as the sparse one"
        )
    checks.check_scalar("eps", eps)
    rest = log_sum(low_rank_log_mass + safe_log(broadcast_rows("lam", lam, shape)), jnp.log(jnp.full(shape, eps)))
    present = ~jnp.isneginf(sparse_log_mass)
    gap = jnp.where(present, rest - jnp.where(present, sparse_log_mass, 0.0), 0.0)
    # 1 / (1 + exp(gap)); beyond 80 the exponential overflows and its derivative is NaN.
    return jnp.where(present & (gap < 80.0), 1.0 / (1.0 + jnp.exp(jnp.minimum(gap, 80.0))), 0.0)


def fuse(
    sparse: BranchOutput,
    low_rank: BranchOutput,
    *,
    gate_sparse: float | Array = 1.0,
    gate_low_rank: float | Array = 1.0,
    lam: float | Array = 1.0,
    eps: float = 1e-6,
    kind: FusionKind = "elsaa",
    stop_gradient_mass: bool = True,
) -> Array:
    """The fused output (B, T, N, H), in the dtype of the branches (Eq. 6 of the paper).

    Kinds, with m = sparse_multiplier(...):
      "elsaa":  g_s m O_s + g_lr O_lr
      "convex": g_s m O_s + g_lr (1 - m) O_lr
      "sum":    g_s O_s + g_lr O_lr, the ablation m = 1
      "lse":    weights softmax(log d_s + log g_s, log d_lr + log lam + log g_lr)

    Args:
      sparse: the sparse branch.
      low_rank: the low-rank branch.
      gate_sparse: g_s >= 0, broadcast to (B, T, N).
      gate_low_rank: g_lr >= 0, broadcast to (B, T, N).
      lam: lambda >= 0, broadcast to (B, T, N).
      eps: floor in the multiplier.
      kind: one of the four.
      stop_gradient_mass: whether the masses are constants to the gradient.
    """
    check_choice("kind", kind, FUSION_KINDS)
    check_bool("stop_gradient_mass", stop_gradient_mass)
    _check_branches(sparse, low_rank, "sparse", "low_rank")
    masses, gates = (sparse.log_mass, low_rank.log_mass), (gate_sparse, gate_low_rank)
    weights = fusion_weights(masses, gates, lam, eps=eps, kind=kind, stop_gradient_mass=stop_gradient_mass)
    return mix(sparse.out, low_rank.out, weights).astype(sparse.out.dtype)


def fusion_weights(
    masses: tuple[Array, Array],
    gates: tuple[float | Array, float | Array],
    lam: float | Array,
    *,
    eps: float | Array,
    kind: FusionKind,
    stop_gradient_mass: bool,
) -> tuple[Array, Array]:
    """The weights (B, T, N) of the sparse and the low-rank output in `fuse`, from log-masses (B, T, N)."""
    shape = masses[0].shape
    gate_sparse, gate_low_rank = (
        broadcast_rows(f"gate_{name}", gate, shape) for name, gate in zip(("sparse", "low_rank"), gates, strict=True)
    )
    if stop_gradient_mass:
        masses = lax.stop_gradient(masses)
    if kind == "lse":
        lam = broadcast_rows("lam", lam, shape)
        return softmax_pair(masses[0] + safe_log(gate_sparse), masses[1] + safe_log(gate_low_rank) + safe_log(lam))[0]
    if kind == "sum":
        return gate_sparse, gate_low_rank
    multiplier = sparse_multiplier(*masses, lam=lam, eps=eps)
    return gate_sparse * multiplier, gate_low_rank * (1 - multiplier if kind == "convex" else 1.0)


def broadcast_rows(name: str, value: float | Array, shape: tuple[int, ...]) -> Array:
    """A gate or lambda at full shape; its values are looked at only where they are concrete."""
    if not isinstance(value, jax.core.Tracer):
        concrete = np.asarray(value, np.float32)
        if not (np.isfinite(concrete).all() and (concrete >= 0).all()):
            raise ValueError(f"{name} has the smallest value {concrete.min()}; all must be finite numbers >= 0")
    try:
        return jnp.broadcast_to(jnp.asarray(value, jnp.float32), shape)
    except ValueError:
        raise ValueError(f"{name} has shape {jnp.shape(value)}; it must broadcast to (B, T, N) = {shape}") from None


def _check_branches(first: BranchOutput, second: BranchOutput, first_name: str, second_name: str) -> None:
    for name, branch in ((first_name, first), (second_name, second)):
        if branch.out.shape[:-1] != branch.log_mass.shape:
            raise ValueError(
                f"{name} has out of shape {branch.out.shape} and log_mass of shape {branch.log_mass.shape}; "
                "they must be (B, T, N, H) and (B, T, N)"
            )
    if first.out.shape != second.out.shape:
        raise ValueError(
            f"{first_name} has out of shape {first.out.shape} and {second_name} of {second.out.shape}; the two must "
            "be equal"
        )
