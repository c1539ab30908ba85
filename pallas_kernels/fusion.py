"""Fusion of the two branches inside the RACE readout kernel, so that the low-rank output is never written.

The kernel computes out = g_s m O_s + g_lr O_lr with m = d_s / (d_s + lambda Den + eps), in log space. The kind "convex"
has g_lr (1 - m) instead of g_lr, and "sum" has m = 1.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax.numpy as jnp

from pallas_kernels.launch import Array, take, take_numbers
from pallas_kernels.soft_codes import DEN_SCALE

FusedKind: TypeAlias = Literal["elsaa", "convex", "sum"]
FUSED_KINDS: tuple[FusedKind, ...] = get_args(FusedKind)


class Sparse(NamedTuple):
    """Results of the sparse branch and the weights of its fusion. All arrays but `out` are float32.

    Attributes:
      out: Output of the sparse branch O_s, (B*T*N, H).
      log_mass: Logarithm of the sparse mass, log d_s, (B*T*N,); -inf without keys.
      lam: Factor lambda of Den, (B*T*N,).
      gate_sparse: Gate of the sparse branch g_s, (B*T*N,).
      gate_low_rank: Gate of the low-rank branch g_lr, (B*T*N,).
    """

    out: Array
    log_mass: Array
    lam: Array
    gate_sparse: Array
    gate_low_rank: Array


def fused(refs: Sparse, kind: FusedKind, rows: Array, low_rank: Array, den: Array, eps: Array) -> Array:
    """Computes fused rows (t, H) from the low-rank rows (t, H) and their Den (t,). Den and eps carry DEN_SCALE."""
    weight, weight_low_rank = (take_numbers(ref, rows, 0.0) for ref in (refs.gate_sparse, refs.gate_low_rank))
    if kind != "sum":
        log_mass = take_numbers(refs.log_mass, rows, -jnp.inf)
        gap = jnp.log(take_numbers(refs.lam, rows, 0.0) * den + eps) - math.log(DEN_SCALE) - log_mass
        # The multiplier is 1 / (1 + exp(gap)), as in `elsaa_jax/arrays/weights.py`; beyond 80 exp would overflow.
        there = (log_mass > -jnp.inf) & (gap < 80.0)
        multiplier = jnp.where(there, 1.0 / (1.0 + jnp.exp(jnp.minimum(gap, 80.0))), 0.0)
        weight = weight * multiplier
        weight_low_rank = weight_low_rank * (1.0 - multiplier) if kind == "convex" else weight_low_rank
    sparse = take(refs.out, rows).astype(jnp.float32)
    return weight[:, None] * sparse + weight_low_rank[:, None] * low_rank
