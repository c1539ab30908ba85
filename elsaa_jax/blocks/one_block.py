"""Attention of tiles of queries to one block of keys each: softmax, log-mass and derivatives, in XLA.

XLA's CPU compiler turns this form into one loop over all cores, without scores in memory (`elsaa_jax.arrays.packing`
says why). The derivatives of queries and of keys compute the scores twice, which costs less than storing them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from elsaa_jax.arrays.packing import pack
from elsaa_jax.types import Array

# Subtracted in the exponents of a row without keys: finite, and below all logits.
LOWEST = -1e30


def forward(query: Array, key: Array, value: Array, bias: Array, scale: float) -> tuple[Array, Array]:
    """Attends from each tile to its block.

    Args:
      query: Tiles of queries, (A, t, H).
      key: Blocks of keys, (A, s, H).
      value: Blocks of values, (A, s, H).
      bias: Mask that broadcasts to (A, t, s): 0, or -inf where a query does not attend to a key.
      scale: Factor of the logits.

    Returns:
      The output (A, t, H) and the log-mass (A, t), float32; 0 and -inf without keys.
    """
    logits = _product("ath,ash->ats", query * scale, key) + bias
    top = jnp.maximum(logits, LOWEST).max(-1)
    weights = jnp.exp(logits - top[..., None])
    out = _product("ats,ash->ath", weights.astype(value.dtype), value)
    out, total, top = pack(out, weights.sum(-1), top)
    total, top = total[..., 0], top[..., 0]
    nonzero = jnp.where(total > 0, total, 1.0)
    return out / nonzero[..., None], jnp.where(total > 0, top + jnp.log(nonzero), -jnp.inf)


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
    """Returns d_query, d_key and d_value in float32.

    With p = exp(logit - log_mass), d_logit = p (d_out . v - shift). `log_mass` and `shift` may cover keys of other
    calls: this is how the levels of a causal split share one softmax.

    Args:
      query: Tiles of queries, (A, t, H).
      key: Blocks of keys, (A, s, H).
      value: Blocks of values, (A, s, H).
      bias: Mask that broadcasts to (A, t, s).
      scale: Factor of the logits.
      log_mass: Log of the whole softmax denominator of each query, (A, t); +inf without keys.
      d_out: Cotangent of the output, (A, t, H).
      shift: out . d_out - d_log_mass, (A, t) float32.
    """
    arrays = query * scale, key, value, bias, log_mass, d_out.astype(value.dtype), shift
    d_query, d_key, d_value = lax.platform_dependent(*arrays, cpu=_derive_fused, default=_derive)
    return d_query * scale, d_key, d_value


def _derive(
    query: Array, key: Array, value: Array, bias: Array, log_mass: Array, d_out: Array, shift: Array
) -> tuple[Array, Array, Array]:
    """Computes the derivatives for scaled queries, with the scores computed once."""
    weights = jnp.exp(_product("ath,ash->ats", query, key) + bias - log_mass[..., None])
    d_weights = _product("ath,ash->ats", d_out, value)
    d_logits = (weights * (d_weights - shift[..., None])).astype(key.dtype)
    d_value = _product("ats,ath->ash", weights.astype(value.dtype), d_out)
    return _product("ats,ash->ath", d_logits, key), _product("ats,ath->ash", d_logits, query), d_value


def _derive_fused(
    query: Array, key: Array, value: Array, bias: Array, log_mass: Array, d_out: Array, shift: Array
) -> tuple[Array, Array, Array]:
    """Computes the same in two loops. Each has a sum whose result is not used: XLA fuses loops that contain one."""
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
