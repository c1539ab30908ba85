"""Attention within stretches and between the tiles and blocks of a plan: one softmax, one custom VJP.

Exact attention has one stretch and no plan, the sparse branch has a plan, and its causal form has both.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from elsaa_jax import dispatch
from elsaa_jax.arrays.guards import first_order_only
from elsaa_jax.arrays.masses import dot_rows
from elsaa_jax.blocks import kernels, xla
from elsaa_jax.blocks.call import BlockCall
from elsaa_jax.types import Array, TilePlan


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    call: BlockCall,
    query: Array,
    key: Array,
    value: Array,
    plan: TilePlan | None,
    query_mask: Array | None,
    key_mask: Array | None,
) -> tuple[Array, Array]:
    """Attends over all keys that the stretches and the plan name.

    Args:
      call: Static facts.
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      plan: Tiles and blocks that attend to each other, or None.
      query_mask: Queries that take part, (B, T) bool, or None.
      key_mask: Keys that take part, (B, S) bool, or None.

    Returns:
      The output (B, T, N, H) in the dtype of the query, and the log-mass (B, T, N) float32.
    """
    forms = functools.partial(kernels.forward, call), functools.partial(xla.forward, call)
    return dispatch.choose(call.route, *forms, query, key, value, plan, query_mask, key_mask)


Residuals = tuple[Array, Array, Array, TilePlan | None, Array | None, Array | None, Array, Array]


def _attend_fwd(
    call: BlockCall,
    query: Array,
    key: Array,
    value: Array,
    plan: TilePlan | None,
    query_mask: Array | None,
    key_mask: Array | None,
) -> tuple[tuple[Array, Array], Residuals]:
    # The guarded arrays are not kept for the backward pass: they would be copies of the inputs.
    out, log_mass = attend(call, *first_order_only((query, key, value)), plan, query_mask, key_mask)
    return (out, log_mass), (query, key, value, plan, query_mask, key_mask, out, log_mass)


def _attend_bwd(
    call: BlockCall, residuals: Residuals, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array, None, None, None]:
    *inputs, out, log_mass = residuals
    d_out, d_log_mass = first_order_only(cotangents)
    # The backward pass subtracts out . d_out - d_log_mass from d_out . v; 0 for a query without keys.
    shift = jnp.where(jnp.isneginf(log_mass), 0.0, dot_rows(out, d_out) - d_log_mass)
    forms = functools.partial(kernels.backward, call), functools.partial(xla.backward, call)
    d_query, d_key, d_value = dispatch.choose(call.route, *forms, *inputs, log_mass, d_out, shift)
    return d_query, d_key, d_value, None, None, None


attend.defvjp(_attend_fwd, _attend_bwd)
