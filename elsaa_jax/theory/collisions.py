"""How likely two vectors share a hash code: rho, pi and q of the paper's rank theory (section 4)."""

from __future__ import annotations

import numpy as np
from scipy import integrate

from elsaa_jax.checks import check_int, check_number


def check_unit(name: str, values: np.ndarray | float) -> np.ndarray:
    """The values as float64; raises ValueError unless all lie within [0, 1]."""
    values = np.asarray(values, np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"{name} goes from {values.min()} to {values.max()}; it must lie within [0, 1]")
    return values


def angular_similarity(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """rho_ij = 1 - arccos(q_i . k_j / (|q_i| |k_j|)) / pi, the probability that a random plane has both on one side.

    Args:
      query: (T, H), no row zero.
      key: (S, H), no row zero.

    Returns:
      (T, S) float64 in [0, 1].
    """
    unit = []
    for name, x in (("query", query), ("key", key)):
        x = np.asarray(x, np.float64)
        if x.ndim != 2:
            raise ValueError(f"{name} has shape {x.shape}; it must be (length, head_dim)")
        norm = np.linalg.norm(x, axis=1, keepdims=True)
        if not (np.isfinite(norm).all() and norm.all()):
            raise ValueError(f"{name} has a row of length 0 or not finite; each must have an angle")
        unit.append(x / norm)
    if unit[0].shape[1] != unit[1].shape[1]:
        raise ValueError(f"query has head_dim {unit[0].shape[1]} and key {unit[1].shape[1]}; the two must be equal")
    return 1.0 - np.arccos(np.clip(unit[0] @ unit[1].T, -1.0, 1.0)) / np.pi


def collision_probability(similarity: np.ndarray | float, num_bits: float) -> np.ndarray:
    """pi = rho^gamma, that all gamma bits of one hash agree; any gamma > 0 is allowed, as in the paper."""
    check_number("num_bits", num_bits, 0.0, open_low=True)
    return check_unit("similarity", similarity) ** num_bits


def edge_probability(similarity: np.ndarray | float, num_bits: float, num_tables: int) -> np.ndarray:
    """q = 1 - (1 - rho^gamma)^L, that at least one of L independent hashes collides."""
    check_int("num_tables", num_tables, 1)
    once = collision_probability(similarity, num_bits)
    with np.errstate(divide="ignore"):
        return -np.expm1(num_tables * np.log1p(-once))


def isotropic_density(num_bits: float, num_tables: int) -> float:
    """q_iso = 1 - (1 - 2^-gamma)^L: q at a right angle, the paper's estimate of its mean over isotropic vectors."""
    return float(edge_probability(0.5, num_bits, num_tables))


def isotropic_mean(num_bits: float, num_tables: int, head_dim: int) -> float:
    """The mean of q over independent isotropic vectors of `head_dim` dimensions, which q_iso stands for.

    Their angle has the density sin(angle)^(d-2), up to a constant. q is neither convex nor concave in rho, so q_iso may
    lie on either side; what it is too large by is the slack eps_iso of the certificate.
    """
    check_int("head_dim", head_dim, 2)
    edge_probability(0.5, num_bits, num_tables)  # refuses bad arguments

    def density(angle: float) -> float:
        return np.sin(angle) ** (head_dim - 2)

    def weighted(angle: float) -> float:
        return density(angle) * float(edge_probability(1.0 - angle / np.pi, num_bits, num_tables))

    mean, whole = (integrate.quad(f, 0.0, np.pi, points=[np.pi / 2], limit=200)[0] for f in (weighted, density))
    return mean / whole
