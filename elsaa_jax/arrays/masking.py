"""Arrays that are safe to sum over where tokens are masked."""

from __future__ import annotations

import jax.numpy as jnp

from elsaa_jax.types import Array


def zero_masked(
    query: Array, key: Array, value: Array, query_mask: Array | None, key_mask: Array | None
) -> tuple[Array, Array, Array]:
    """Returns the arrays with masked keys and values, and non-finite numbers of masked queries, set to 0.

    A masked token has weight 0, and 0 * NaN would be NaN.

    Args:
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      query_mask: Queries that take part, (B, T) bool, or None.
      key_mask: Keys that take part, (B, S) bool, or None.
    """
    if query_mask is not None:
        query = jnp.where(query_mask[:, :, None, None] | jnp.isfinite(query), query, 0)
    if key_mask is not None:
        keep = key_mask[:, :, None, None]
        key, value = jnp.where(keep, key, 0), jnp.where(keep, value, 0)
    return query, key, value
