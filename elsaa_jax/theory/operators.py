"""The attention of one head as a dense float64 matrix, which the layer applies to its values.

The definitions are those of `elsaa_jax.reference`, which computes in float32; that is too coarse to count small
singular values. An operator consists of its matrix and the logarithm of its mass. RACE has one ensemble here, and
masses are sums over keys (`mass_scale="count"`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, softmax

from elsaa_jax.checks import check_choice, check_int, check_number
from elsaa_jax.config import FUSION_KINDS
from elsaa_jax.theory.supports import Support, to_dense
from elsaa_jax.types import FusionKind


class Operator(NamedTuple):
    """One branch as a matrix.

    Attributes:
      matrix: Attention weights, (T, S) float64. A row sums to 1, or to 0 if a query has no key.
      log_mass: Logarithm of the denominator, (T,). It is -inf if a query has no key.
    """

    matrix: np.ndarray
    log_mass: np.ndarray


def softmax_operator(query: np.ndarray, key: np.ndarray, support: Support, *, scale: float | None = None) -> Operator:
    """Builds softmax attention over a support. With a full support it is exact attention.

    Args:
      query: Queries, (T, H).
      key: Keys, (S, H).
      support: Boolean matrix (T, S), dense or SciPy sparse.
      scale: Factor of the logits. None means H**-0.5.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> operator = theory.softmax_operator(np.zeros((1, 2)), np.ones((3, 2)), np.array([[True, True, False]]))
      >>> operator.matrix, np.exp(operator.log_mass)
      (array([[0.5, 0.5, 0. ]]), array([2.]))
    """
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    support = to_dense(support)
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
    """Builds RACE attention: the kernel B A = (1/L) sum_l Phi_l(Q) Phi_l(K)^T, divided by its row sums plus eps.

    The soft codes of each table sum to 1, so the L 2^P columns of B have L - 1 linear relations. The rank of B A is at
    most L (2^P - 1) + 1, which is `race_rank`, and not L 2^P. The causal form is the lower triangle of the kernel.

    Args:
      query: Queries, (T, H).
      key: Keys, (S, H).
      planes: Hash planes, (L, P, H).
      beta: Sharpness of the soft codes.
      is_causal: Whether the queries are the last T of S positions and attend to positions up to their own.
      eps: Floor of the denominator.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> query, key = np.random.default_rng(0).normal(size=(2, 20, 4))
      >>> operator = theory.race_operator(query, key, np.eye(4)[None, :2])
      >>> int(np.linalg.matrix_rank(operator.matrix)), theory.race_rank(num_tables=1, num_bits=2)
      (4, 4)
    """
    kernel = _soft_codes(query, planes, beta) @ _soft_codes(key, planes, beta).T / len(planes)
    if is_causal:
        kernel = np.tril(kernel, k=kernel.shape[1] - kernel.shape[0])
    mass = kernel.sum(axis=1)
    floor = np.where(mass > 0, mass + eps, 1.0)
    with np.errstate(divide="ignore"):
        return Operator(kernel / floor[:, None], np.log(mass))


def race_rank(num_tables: int, num_bits: int) -> int:
    """Computes L (2^P - 1) + 1, the largest rank of non-causal RACE attention.

    For M ensembles of L tables each, use `race_rank(M * L, P)`. Their outputs are averaged, so the rank is at most the
    sum M (L (2^P - 1) + 1), and the vector of ones lies in all M column spaces, which leaves M L (2^P - 1) + 1.

    Args:
      num_tables: Number of tables L, or M * L for M ensembles.
      num_bits: Bits of each table, P.

    Example:
      >>> from elsaa_jax import theory
      >>> theory.race_rank(num_tables=4, num_bits=4)
      61
    """
    check_int("num_tables", num_tables, 1)
    check_int("num_bits", num_bits, 1)
    return int(num_tables) * (2 ** int(num_bits) - 1) + 1


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
    """Builds the matrix (T, S) that `elsaa_jax.fuse` applies, for constant gates and a constant lambda.

    Args:
      sparse: Sparse branch.
      low_rank: Low-rank branch.
      kind: Fusion kind, "elsaa", "convex", "sum" or "lse".
      lam: Weight lambda >= 0 of the low-rank mass.
      gate_sparse: Gate of the sparse branch, >= 0.
      gate_low_rank: Gate of the low-rank branch, >= 0.
      eps: Floor of the multiplier's denominator.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> sparse = theory.Operator(np.array([[1.0, 0.0]]), np.log([3.0]))
      >>> low_rank = theory.Operator(np.array([[0.5, 0.5]]), np.log([1.0]))
      >>> theory.fused_operator(sparse, low_rank, kind="convex", eps=0.0)
      array([[0.875, 0.125]])
    """
    check_choice("kind", kind, FUSION_KINDS)
    numbers = {"lam": lam, "gate_sparse": gate_sparse, "gate_low_rank": gate_low_rank, "eps": eps}
    for name, value in numbers.items():
        check_number(name, value, 0.0)
    with np.errstate(divide="ignore"):
        log_lam, log_gate_sparse, log_gate_low_rank, log_eps = (np.log(float(x)) for x in numbers.values())
    log_sparse, log_low_rank = sparse.log_mass, low_rank.log_mass + log_lam
    if kind == "lse":
        log_sparse, log_low_rank, log_eps = log_sparse + log_gate_sparse, log_low_rank + log_gate_low_rank, -np.inf
    total = np.logaddexp(np.logaddexp(log_sparse, log_low_rank), log_eps)
    share = _share(log_sparse, total)
    ones = np.ones_like(share)
    weights = {
        "elsaa": (gate_sparse * share, gate_low_rank * ones),
        "convex": (gate_sparse * share, gate_low_rank * (1 - share)),
        "sum": (gate_sparse * ones, gate_low_rank * ones),
        "lse": (share, _share(log_low_rank, total)),
    }[kind]
    return weights[0][:, None] * sparse.matrix + weights[1][:, None] * low_rank.matrix


def _share(log_part: np.ndarray, log_total: np.ndarray) -> np.ndarray:
    """Computes exp(log_part - log_total), 0 for a part without mass."""
    present = np.isfinite(log_part)
    return np.where(present, np.exp(np.where(present, log_part, 0.0) - np.where(present, log_total, 0.0)), 0.0)


def _soft_codes(x: np.ndarray, planes: np.ndarray, beta: float) -> np.ndarray:
    """Computes the softmax of beta tanh(W x) . v_r over the corners v_r of each table, (T, H) -> (T, L 2^P)."""
    x, planes = (np.asarray(a, np.float64) for a in (x, planes))
    num_bits = planes.shape[1]
    corners = 2.0 * (np.arange(2**num_bits)[:, None] >> np.arange(num_bits) & 1) - 1.0
    return softmax(beta * np.tanh(np.einsum("th,lph->tlp", x, planes)) @ corners.T, axis=-1).reshape(len(x), -1)
