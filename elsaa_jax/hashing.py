"""Hyperplanes, soft codes for RACE, and hard codes and their order for sortLSH."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.checks import check_int
from elsaa_jax.config import MAX_HARD_BITS
from elsaa_jax.types import Array


def sample_planes(rng: Array, shape: tuple[int, ...]) -> Array:
    """Draws Gaussian hyperplanes N(0, 1) in float32.

    Args:
      rng: Random key.
      shape: Shape of the planes; the last axis is the head dimension.

    Example:
      >>> import jax
      >>> from elsaa_jax import sample_planes
      >>> sample_planes(jax.random.key(0), (4, 3, 16)).shape  # 4 tables of 3 bits
      (4, 3, 16)
    """
    return jax.random.normal(rng, shape, jnp.float32)


def project(x: Array, planes: Array, plane_axes: int) -> Array:
    """Computes dot products of vectors and hyperplanes, in float32 at the highest precision.

    The default precision of a GPU, TF32, would give other codes than a CPU.

    Args:
      x: Vectors, (..., H), or (..., K, H) if each head has its own planes.
      planes: Hyperplanes, `(*plane_axes, H)`, shared by the heads, or `(K, *plane_axes, H)`.
      plane_axes: Number of axes of the planes between heads and H.

    Returns:
      The products, `(..., *plane_axes)` float32.
    """
    if planes.ndim not in (plane_axes + 1, plane_axes + 2) or x.shape[-1] != planes.shape[-1]:
        raise ValueError(
            f"planes have shape {planes.shape} for vectors of shape {x.shape}; they must have "
            f"{plane_axes + 1} axes, or {plane_axes + 2} with one set for each head, and end in {x.shape[-1]}"
        )
    x, planes = x.astype(jnp.float32), planes.astype(jnp.float32)
    per_head = planes.ndim == plane_axes + 2
    if per_head and (x.ndim < 2 or x.shape[-2] != planes.shape[0]):
        raise ValueError(
            f"planes have shape {planes.shape}, one set for each of {planes.shape[0]} heads, "
            f"but the vectors have shape {x.shape}"
        )
    subscripts = "...kh,kzh->...kz" if per_head else "...h,zh->...z"
    flat = planes.reshape(*planes.shape[: planes.ndim - plane_axes - 1], -1, planes.shape[-1])
    dots = jnp.einsum(subscripts, x, flat, precision=lax.Precision.HIGHEST)
    return dots.reshape(*dots.shape[:-1], *planes.shape[-plane_axes - 1 : -1])


def hard_codes(x: Array, planes: Array) -> Array:
    """Computes binary codes: bit p is (x . planes[p] > 0), with weight `2**p`.

    Args:
      x: Vectors, (..., H), or (..., K, H) if each head has its own planes.
      planes: Hyperplanes, (P, H) or (K, P, H).

    Returns:
      The codes, (...) int32, in `[0, 2**P)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax import hard_codes
      >>> hard_codes(jnp.array([[1.0, -1.0], [1.0, 1.0]]), jnp.eye(2)).tolist()
      [1, 3]
    """
    num_bits = planes.shape[-2] if planes.ndim > 1 else 0
    check_int("the number of bits of the planes", num_bits, 1, MAX_HARD_BITS)
    bits = (project(x, planes, 1) > 0).astype(jnp.int32)
    return jnp.sum(bits << lax.broadcasted_iota(jnp.int32, bits.shape, bits.ndim - 1), axis=-1)


def gray_rank(codes: Array, num_bits: int) -> Array:
    """Returns the rank of each code in the reflected Gray sequence, in which neighbours differ in one bit.

    It is the inverse of r -> r ^ (r >> 1) on codes of `num_bits` bits.

    Args:
      codes: Binary codes, int32.
      num_bits: Bits of the codes, P.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax import gray_rank
      >>> gray_rank(jnp.array([0, 1, 3, 2]), 2).tolist()
      [0, 1, 2, 3]
    """
    check_int("num_bits", num_bits, 1, MAX_HARD_BITS)
    shift = 1
    while shift < num_bits:
        codes = codes ^ (codes >> shift)
        shift *= 2
    return codes


def soft_codes(x: Array, planes: Array, beta: float | Array = 1.0) -> Array:
    """Computes the soft bucket assignments of Alg. 2, by products of sigmoids.

    phi_r(x) = exp(beta tanh(W x) . v_r) / sum_r' exp(beta tanh(W x) . v_r') over the corners v_r of {-1, 1}^P is equal
    to prod_p sigmoid(2 beta v_rp tanh(w_p . x)): P sigmoids instead of `2**P` exponentials. Corner r has v_rp = +1
    where bit p of r is set, so the heaviest bucket of a table is the hard code of the same planes.

    Args:
      x: Vectors, (..., H), or (..., K, H) if each head has its own planes.
      planes: Hyperplanes, (L, P, H) or (K, L, P, H).
      beta: Sharpness, a scalar.

    Returns:
      The soft codes, `(..., L, 2**P)` float32. Each table sums to 1.

    Example:
      >>> import jax
      >>> from elsaa_jax import sample_planes, soft_codes
      >>> x = jax.random.normal(jax.random.key(0), (5, 16))
      >>> soft_codes(x, sample_planes(jax.random.key(1), (4, 3, 16))).shape
      (5, 4, 8)
    """
    turn = 2 * jnp.asarray(beta, jnp.float32) * jnp.tanh(project(x, planes, 2))
    ones, zeros = jax.nn.sigmoid(turn), jax.nn.sigmoid(-turn)
    codes = jnp.ones_like(turn[..., :1])
    for p in range(turn.shape[-1]):
        codes = jnp.concatenate([codes * zeros[..., p : p + 1], codes * ones[..., p : p + 1]], axis=-1)
    return codes
