"""The attention of one head as a dense matrix, in float64: what the layer applies to its values.

The branches and their fusion as in `elsaa_jax.reference`, which computes in float32: too coarse to count small singular
values. Each operator is its matrix and the logarithm of its mass; RACE has one ensemble, and masses are sums over keys
(`mass_scale="count"`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, softmax

from elsaa_jax.checks import check_choice
from elsaa_jax.config import FUSION_KINDS
from elsaa_jax.types import FusionKind


class Operator(NamedTuple):
    """One branch as a matrix.

    Attributes:
      matrix: (T, S) float64; rows sum to 1, or to 0 where a query has no key.
      log_mass: (T,), log of the denominator; -inf where a query has no key.
    """

    matrix: np.ndarray
    log_mass: np.ndarray


def softmax_operator(
    query: np.ndarray, key: np.ndarray, support: np.ndarray, *, scale: float | None = None
) -> Operator:
    """Softmax attention over a support: diag(d)^-1 (Omega * exp(scale Q K^T)); exact where the support is full.

    Args:
      query: (T, H).
      key: (S, H).
      support: (T, S) bool.
      scale: of the logits; H**-0.5 where None.
    """
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    logits = query @ key.T * (query.shape[1] ** -0.5 if scale is None else scale)
    present = support.any(axis=1)
    matrix, log_mass = np.zeros(support.shape), np.full(len(support), -np.inf)
    logits = np.where(support, logits, -np.inf)[present]
    matrix[present], log_mass[present] = softmax(logits, axis=1), logsumexp(logits, axis=1)
    return Operator(matrix, log_mass)


def race_operator(
    query: np.ndarray,
    key: np.ndarray,
    planes: np.ndarray,
    *,
    beta: float = 1.0,
    is_causal: bool = False,
    eps: float = 1e-6,
) -> Operator:
    """RACE attention: diag(Den + eps)^-1 B A with B A = (1/L) sum_l Phi_l(Q) Phi_l(K)^T, lower triangular where causal.

    Each table's soft codes sum to 1, so the L 2^P columns of B have L - 1 relations: B A has rank at most
    L (2^P - 1) + 1 (`race_rank`), not L 2^P.

    Args:
      query: (T, H).
      key: (S, H).
      planes: (L, P, H).
      beta: sharpness of the soft codes.
      is_causal: query i is the (S - T + i)-th position and attends to positions up to its own.
      eps: floor of the denominator.
    """
    kernel = _soft_codes(query, planes, beta) @ _soft_codes(key, planes, beta).T / len(planes)
    if is_causal:
        kernel = np.tril(kernel, k=kernel.shape[1] - kernel.shape[0])
    mass = kernel.sum(axis=1)
    return Operator(kernel / (mass + eps)[:, None], np.log(mass))


def race_rank(num_tables: int, num_bits: int) -> int:
    """L (2^P - 1) + 1, the largest rank of RACE that is not causal."""
    return num_tables * (2**num_bits - 1) + 1


def fused_operator(
    sparse: Operator,
    low_rank: Operator,
    *,
    kind: FusionKind = "elsaa",
    lam: float = 1.0,
    gate_sparse: float = 1.0,
    gate_low_rank: float = 1.0,
    eps: float = 1e-6,
) -> np.ndarray:
    """The matrix (T, S) of `elsaa_jax.fuse`, with numbers for gates and lambda."""
    check_choice("kind", kind, FUSION_KINDS)
    with np.errstate(divide="ignore"):
        log_sparse, log_low_rank, log_eps = sparse.log_mass, low_rank.log_mass + np.log(lam), np.log(eps)
        if kind == "lse":
            log_sparse, log_low_rank = log_sparse + np.log(gate_sparse), log_low_rank + np.log(gate_low_rank)
            log_eps = -np.inf
    share = np.exp(log_sparse - np.logaddexp(np.logaddexp(log_sparse, log_low_rank), log_eps))
    weights = {
        "elsaa": (gate_sparse * share, gate_low_rank),
        "convex": (gate_sparse * share, gate_low_rank * (1 - share)),
        "sum": (gate_sparse, gate_low_rank),
        "lse": (share, 1 - share),
    }[kind]
    return sum(np.reshape(w, (-1, 1)) * x.matrix for w, x in zip(weights, (sparse, low_rank), strict=True))


def _soft_codes(x: np.ndarray, planes: np.ndarray, beta: float) -> np.ndarray:
    """(T, H) -> (T, L 2^P): for each table, softmax over the corners v_r of beta tanh(W x) . v_r."""
    x, planes = (np.asarray(a, np.float64) for a in (x, planes))
    num_bits = planes.shape[1]
    corners = 2.0 * (np.arange(2**num_bits)[:, None] >> np.arange(num_bits) & 1) - 1.0
    return softmax(beta * np.tanh(np.einsum("th,lph->tlp", x, planes)) @ corners.T, axis=-1).reshape(len(x), -1)
