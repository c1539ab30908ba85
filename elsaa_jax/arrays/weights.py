"""Weights of two parts of an output, from their log-masses: the multiplier (Eq. 5) and the kinds of fusion (Eq. 6).

The functions take checked arrays of one shape, (B, T, N) in attention.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from elsaa_jax.arrays.masses import safe_log, safe_max
from elsaa_jax.types import Array, FusionKind

# Largest exponent whose exponential is used: beyond it, products with lambda would overflow in float32.
MAX_EXPONENT = 60.0


def multiplier(sparse_log_mass: Array, low_rank_log_mass: Array, lam: Array, eps: Array) -> Array:
    """Returns m = d_sparse / (d_sparse + lam d_lr + eps), from the logarithms of the masses; 0 where d_sparse is 0."""
    present = ~jnp.isneginf(sparse_log_mass)
    sparse_log_mass = jnp.where(present, sparse_log_mass, 0.0)
    # lam and eps are factors outside of the exponentials, so that the derivative at lam = 0 is right.
    rest = lam * _exp(low_rank_log_mass - sparse_log_mass) + eps * _exp(-sparse_log_mass)
    return jnp.where(present, 1.0 / (1.0 + rest), 0.0)


def fusion_weights(
    masses: tuple[Array, Array],
    gates: tuple[Array, Array],
    lam: Array,
    eps: Array,
    kind: FusionKind,
    stop_gradient_mass: bool,
) -> tuple[Array, Array]:
    """Returns the weights of the sparse and of the low-rank output; `elsaa_jax.fuse` has the formulas.

    Args:
      masses: Log-masses of the sparse and the low-rank branch.
      gates: Gates of the two branches.
      lam: Lambda, the factor of the low-rank mass.
      eps: Floor of the denominator, a scalar or an array of the same shape.
      kind: Kind of fusion.
      stop_gradient_mass: Whether the masses are constants to the gradient.
    """
    if stop_gradient_mass:
        masses = lax.stop_gradient(masses)
    if kind == "sum":
        return gates
    if kind == "lse":
        scales = gates[0], gates[1] * lam
        logs = [mass + safe_log(scale) for mass, scale in zip(masses, scales, strict=True)]
        base = safe_max(lax.stop_gradient(jnp.maximum(*logs)))
        sparse, low_rank = (scale * _exp(mass - base) for mass, scale in zip(masses, scales, strict=True))
        present = sparse + low_rank > 0
        total = jnp.where(present, sparse + low_rank, 1.0)
        return jnp.where(present, sparse / total, 0.0), jnp.where(present, low_rank / total, 0.0)
    m = multiplier(*masses, lam, jnp.broadcast_to(eps, lam.shape))
    return gates[0] * m, gates[1] * (1 - m if kind == "convex" else 1.0)


def _exp(x: Array) -> Array:
    return jnp.exp(jnp.minimum(x, MAX_EXPONENT))
