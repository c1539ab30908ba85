"""Probabilities that two vectors share a hash code: rho, pi and q of the paper's rank theory (section 4)."""

from __future__ import annotations

import numpy as np
from scipy import integrate

from elsaa_jax.checks import check_int, check_number


def check_unit(name: str, values: np.ndarray | float) -> np.ndarray:
    """Returns the values as float64; raises ValueError unless all lie within [0, 1]."""
    values = np.asarray(values, np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"{name} goes from {values.min()} to {values.max()}; it must lie within [0, 1]")
    return values


def angular_similarity(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Computes rho_ij, the probability that a random plane has query i and key j on the same side.

    rho_ij = 1 - arccos(q_i . k_j / (|q_i| |k_j|)) / pi.

    Args:
      query: Queries, (T, H), without zero rows.
      key: Keys, (S, H), without zero rows.

    Returns:
      Similarities within [0, 1], (T, S) float64.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> theory.angular_similarity(np.array([[1.0, 0.0]]), np.array([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
      array([[1. , 0.5, 0. ]])
    """
    unit = []
    for name, x in (("query", query), ("key", key)):
        x = np.asarray(x, np.float64)
        if x.ndim != 2:
            raise ValueError(f"{name} has shape {x.shape}; it must be (length, head_dim)")
        norm = np.linalg.norm(x, axis=1, keepdims=True)
        if not (np.isfinite(norm).all() and norm.all()):
            raise ValueError(f"{name} has a row of length 0 or not finite; each row must have an angle")
        unit.append(x / norm)
    if unit[0].shape[1] != unit[1].shape[1]:
        raise ValueError(f"query has head_dim {unit[0].shape[1]} and key {unit[1].shape[1]}; the two must be equal")
    return 1.0 - np.arccos(np.clip(unit[0] @ unit[1].T, -1.0, 1.0)) / np.pi


def collision_probability(similarity: np.ndarray | float, num_bits: float) -> np.ndarray:
    """Computes pi = rho^gamma, the probability that all gamma bits of one hash agree.

    Args:
      similarity: Angular similarities rho within [0, 1], any shape.
      num_bits: Number of bits gamma > 0. As in the paper, it need not be an integer.

    Example:
      >>> from elsaa_jax import theory
      >>> float(theory.collision_probability(0.5, num_bits=3))
      0.125
    """
    check_number("num_bits", num_bits, 0.0, open_low=True)
    return check_unit("similarity", similarity) ** float(num_bits)


def edge_probability(similarity: np.ndarray | float, num_bits: float, num_tables: int) -> np.ndarray:
    """Computes q = 1 - (1 - rho^gamma)^L, the probability that at least one of L independent hashes collides.

    Args:
      similarity: Angular similarities rho within [0, 1], any shape.
      num_bits: Bits of each hash, gamma.
      num_tables: Number of hashes, L.

    Example:
      >>> from elsaa_jax import theory
      >>> float(theory.edge_probability(0.5, num_bits=1, num_tables=2))
      0.75
    """
    check_int("num_tables", num_tables, 1)
    once = collision_probability(similarity, num_bits)
    with np.errstate(divide="ignore"):
        return -np.expm1(int(num_tables) * np.log1p(-once))


def isotropic_density(num_bits: float, num_tables: int) -> float:
    """Computes q_iso = 1 - (1 - 2^-gamma)^L, the edge probability at a right angle.

    It is the paper's estimate of the mean edge probability of isotropic vectors.

    Args:
      num_bits: Bits of each hash, gamma.
      num_tables: Number of hashes, L.

    Example:
      >>> from elsaa_jax import theory
      >>> round(theory.isotropic_density(num_bits=4, num_tables=4), 4)
      0.2275
    """
    return float(edge_probability(0.5, num_bits, num_tables))


def isotropic_mean(num_bits: float, num_tables: int, head_dim: int) -> float:
    """Computes the mean edge probability of independent isotropic vectors, which q_iso estimates.

    The angle of such vectors has a density proportional to sin(angle)^(d - 2). As a function of rho, q is concave for
    gamma = 1, convex for L = 1 and gamma >= 1, and neither in general. So q_iso may lie on either side of the mean. If
    it is larger, the difference is the slack eps_iso of the certificate.

    Args:
      num_bits: Bits of each hash, gamma.
      num_tables: Number of hashes, L.
      head_dim: Dimension of the vectors, d >= 2.

    Example:
      >>> from elsaa_jax import theory
      >>> round(theory.isotropic_mean(num_bits=1, num_tables=4, head_dim=2), 4)
      0.8
    """
    check_int("head_dim", head_dim, 2)
    edge_probability(0.5, num_bits, num_tables)  # Refuses bad arguments before the integration.

    def density(angle: float) -> float:
        return np.sin(angle) ** (int(head_dim) - 2)

    def weighted(angle: float) -> float:
        return density(angle) * float(edge_probability(1.0 - angle / np.pi, num_bits, num_tables))

    mean, whole = (integrate.quad(f, 0.0, np.pi, points=[np.pi / 2], limit=200)[0] for f in (weighted, density))
    return mean / whole
