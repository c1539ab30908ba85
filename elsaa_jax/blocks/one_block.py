"""Attention of rows of queries to blocks of keys: softmax, log-mass and derivatives of one block.

Written for XLA's CPU compiler, which makes one loop of it, on all cores and without scores in memory
(see `packing`). The derivatives of queries and of keys compute the scores twice, which costs less
than to store them once.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from elsaa_jax.arrays.masses import normalize
from elsaa_jax.arrays.packing import pack
from elsaa_jax.types import Array

# Where a row has no keys, of what is subtracted in its exponents: finite, and below all logits.
LOWEST = -1e30


def forward(query: Array, key: Array, value: Array, bias: Array, scale: float) -> tuple[Array, Array]:
    """out (A, t, H) and log_mass (A, t), float32; 0 and -inf without keys.

    Args:
      query: (A, t, H).
      key: (A, s, H).
      value: (A, s, H).
      bias: broadcasts to (A, t, s); 0, or -inf where a query does not attend to a key.
      scale: factor of the logits.
    """
    logits = _product("ath,ash->ats", query * scale, key) + bias
    top = jnp.maximum(logits, LOWEST).max(-1)
    weights = jnp.exp(logits - top[..., None])
    out = _product("ats,ash->ath", weights.astype(value.dtype), value)
    out, total, top = pack(out, weights.sum(-1), top)
    return normalize(out, total[..., 0], top[..., 0])


def backward(
    query: Array,
    key: Array,
    value: Array,
    bias: Array,
    scale: float,
    log_mass: Array,
    d_out: Array,
    shift: Array,
) -> tuple[Array, Array, Array]:
    """d_query, d_key and d_value in float32, from the log_mass of all keys that a query saw.

    With p = exp(logit - log_mass), d_logit = p (d_out . v - shift): `log_mass` and `shift` may
    include keys of other calls, which is how the levels of a causal split share one softmax.
    """
    arrays = query * scale, key, value, bias, log_mass, d_out.astype(value.dtype), shift
    d_query, d_key, d_value = lax.platform_dependent(*arrays, cpu=_derive_fused, default=_derive)
    return d_query * scale, d_key, d_value


def _derive(query, key, value, bias, log_mass, d_out, shift):
    """Derivatives for scaled queries; scores are computed once."""
    weights = jnp.exp(_product("ath,ash->ats", query, key) + bias - log_mass[..., None])
    d_weights = _product("ath,ash->ats", d_out, value)
    d_logits = (weights * (d_weights - shift[..., None])).astype(key.dtype)
    d_value = _product("ats,ath->ash", weights.astype(value.dtype), d_out)
    return _product("ats,ash->ath", d_logits, key), _product("ats,ath->ash", d_logits, query), d_value


def _derive_fused(query, key, value, bias, log_mass, d_out, shift):
    """The same in two loops, each with a sum in it, which nobody reads."""
    weights = jnp.exp(_product("ath,ash->ats", query, key) + bias - log_mass[..., None])
    d_logits = weights * (_product("ath,ash->ats", d_out, value) - shift[..., None])
    d_query, _ = pack(_product("ats,ash->ath", d_logits.astype(key.dtype), key), d_logits.sum(-1))
    bias, log_mass, shift = bias.swapaxes(1, 2), log_mass[:, None, :], shift[:, None, :]
    weights = jnp.exp(_product("ash,ath->ast", key, query) + bias - log_mass)
    d_logits = weights * (_product("ash,ath->ast", value, d_out) - shift)
    d_key = _product("ast,ath->ash", d_logits.astype(key.dtype), query)
    d_value = _product("ast,ath->ash", weights.astype(value.dtype), d_out)
    d_key, d_value, _ = pack(d_key, d_value, d_logits.sum(-1))
    return d_query, d_key, d_value


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
