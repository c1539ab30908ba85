"""Fuses branches by their masses: the log-sum-exp merge and the denominator-aware multiplier."""

from __future__ import annotations

import jax.numpy as jnp

from elsaa_jax.arrays.masses import mix, softmax_pair
from elsaa_jax.arrays.weights import fusion_weights, multiplier
from elsaa_jax.checks import check_bool, check_choice, check_scalar, check_weights
from elsaa_jax.config import FUSION_KINDS
from elsaa_jax.types import Array, BranchOutput, FusionKind


def merge(first: BranchOutput, second: BranchOutput) -> BranchOutput:
    """Computes the attention over two disjoint sets of keys from the attention over each (MergeLSE of Alg. 5).

    log_mass = log(exp(l_1) + exp(l_2)), and out is the mean of the outputs with weights exp(l_k). Two rows without
    keys give out 0 and log_mass -inf, with gradient 0.

    Args:
      first: Branch over the first set.
      second: Branch over the second set.

    Example:
      >>> import jax
      >>> from elsaa_jax import exact_attention, merge
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 16))
      >>> halves = [exact_attention(q, k[:, part], v[:, part]) for part in (slice(0, 3), slice(3, 8))]
      >>> whole = exact_attention(q, k, v)
      >>> bool(jax.numpy.allclose(merge(*halves).out, whole.out, atol=1e-5))
      True
    """
    _check_branches(first, second, "first", "second")
    weights, log_mass = softmax_pair(first.log_mass, second.log_mass)
    out = mix(first.out, second.out, weights)
    return BranchOutput(out.astype(first.out.dtype), log_mass)


def sparse_multiplier(
    sparse_log_mass: Array, low_rank_log_mass: Array, *, lam: float | Array = 1.0, eps: float | Array = 1e-6
) -> Array:
    """Computes m = d_sparse / (d_sparse + lam d_lr + eps), Eq. 5, in log space.

    Args:
      sparse_log_mass: log d_sparse, (B, T, N).
      low_rank_log_mass: log d_lr, (B, T, N).
      lam: Lambda >= 0, broadcast to (B, T, N).
      eps: Floor of the denominator, a scalar.

    Returns:
      The multiplier m (B, T, N), 0 where the sparse branch has no key.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax import sparse_multiplier
      >>> log_mass = jnp.zeros((1, 1, 1))
      >>> print(sparse_multiplier(log_mass, log_mass, eps=0.0).item())
      0.5
    """
    shape = sparse_log_mass.shape
    if low_rank_log_mass.shape != shape:
        raise ValueError(
            f"low_rank_log_mass has shape {low_rank_log_mass.shape}; it must be {shape}, as the sparse one"
        )
    check_scalar("eps", eps)
    check_weights("lam", lam, shape)
    lam, eps = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in (lam, eps))
    return multiplier(sparse_log_mass, low_rank_log_mass, lam, eps)


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
    """Fuses the two branches (Eq. 6 of the paper).

    Kinds, with m = sparse_multiplier(...):
      "elsaa":  g_s m O_s + g_lr O_lr
      "convex": g_s m O_s + g_lr (1 - m) O_lr
      "sum":    g_s O_s + g_lr O_lr, the ablation m = 1
      "lse":    weights softmax(log d_s + log g_s, log d_lr + log lam + log g_lr)

    Args:
      sparse: Sparse branch.
      low_rank: Low-rank branch.
      gate_sparse: Gate g_s >= 0, broadcast to (B, T, N).
      gate_low_rank: Gate g_lr >= 0, broadcast to (B, T, N).
      lam: Lambda >= 0, broadcast to (B, T, N).
      eps: Floor of the denominator of m.
      kind: Kind of fusion, one of the four.
      stop_gradient_mass: Whether the masses are constants to the gradient.

    Returns:
      The fused output (B, T, N, H), in the dtype of the branches.

    Example:
      >>> import jax
      >>> from elsaa_jax import exact_attention, fuse, race_attention, sample_planes
      >>> x = jax.random.normal(jax.random.key(0), (1, 8, 2, 16))
      >>> low_rank = race_attention(x, x, x, sample_planes(jax.random.key(1), (4, 3, 16)))
      >>> fuse(exact_attention(x, x, x), low_rank, kind="convex").shape
      (1, 8, 2, 16)
    """
    check_choice("kind", kind, FUSION_KINDS)
    check_bool("stop_gradient_mass", stop_gradient_mass)
    check_scalar("eps", eps)
    _check_branches(sparse, low_rank, "sparse", "low_rank")
    shape = sparse.log_mass.shape
    for name, value in (("gate_sparse", gate_sparse), ("gate_low_rank", gate_low_rank), ("lam", lam)):
        check_weights(name, value, shape)
    return fuse_checked(
        sparse, low_rank, (gate_sparse, gate_low_rank), lam, eps=eps, kind=kind, stop_gradient_mass=stop_gradient_mass
    )


def fuse_checked(
    sparse: BranchOutput,
    low_rank: BranchOutput,
    gates: tuple[float | Array, float | Array],
    lam: float | Array,
    *,
    eps: float | Array,
    kind: FusionKind,
    stop_gradient_mass: bool,
) -> Array:
    """Fuses the two branches, with arguments that were checked."""
    shape = sparse.log_mass.shape
    gate_sparse, gate_low_rank, lam = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in (*gates, lam))
    masses = sparse.log_mass, low_rank.log_mass
    floor = jnp.asarray(eps, jnp.float32)
    weights = fusion_weights(masses, (gate_sparse, gate_low_rank), lam, floor, kind, stop_gradient_mass)
    return mix(sparse.out, low_rank.out, weights).astype(sparse.out.dtype)


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
