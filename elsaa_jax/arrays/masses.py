"""Arithmetic of log-masses, with values and gradients that stay finite where a query has no keys."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from elsaa_jax.types import Array


def safe_max(log_mass: Array) -> Array:
    """Returns a maximum that may be subtracted: 0 where it is -inf."""
    return jnp.where(jnp.isneginf(log_mass), 0.0, log_mass)


def safe_log(x: Array) -> Array:
    """Returns log x; at 0 it is -inf and its gradient is 0."""
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), -jnp.inf)


def log_sum(first: Array, second: Array) -> Array:
    """Returns log(exp(first) + exp(second)); where both are -inf it is -inf and its gradient is 0."""
    base = safe_max(lax.stop_gradient(jnp.maximum(first, second)))
    return safe_log(jnp.exp(first - base) + jnp.exp(second - base)) + base


def softmax_pair(first: Array, second: Array) -> tuple[tuple[Array, Array], Array]:
    """Returns softmax(first, second) and their log-sum-exp; 0, 0 and -inf where both are -inf."""
    total = log_sum(first, second)
    base = safe_max(total)
    return (jnp.exp(first - base), jnp.exp(second - base)), total


def mix(first: Array, second: Array, weights: tuple[Array, Array]) -> Array:
    """Returns the float32 sum of outputs (..., H) with weights (...)."""
    return weights[0][..., None] * first.astype(jnp.float32) + weights[1][..., None] * second.astype(jnp.float32)


def dot_rows(first: Array, second: Array) -> Array:
    """Returns the float32 dot products (...) of rows (..., H).

    An einsum, because on a CPU the same as a sum took 30 times as long.
    """
    rows = first.astype(jnp.float32), second.astype(jnp.float32)
    return jnp.einsum("...h,...h->...", *rows, precision=lax.Precision.HIGHEST)
