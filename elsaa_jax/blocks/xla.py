"""Attention within stretches and over a plan, in XLA. `kernels` is the same by GPU kernels."""

from __future__ import annotations

import jax.numpy as jnp

from elsaa_jax.blocks import dense, tiles
from elsaa_jax.blocks.call import BlockCall
from elsaa_jax.types import Array, TilePlan


def forward(
    call: BlockCall,
    query: Array,
    key: Array,
    value: Array,
    plan: TilePlan | None,
    query_mask: Array | None,
    key_mask: Array | None,
) -> tuple[Array, Array]:
    """Returns the output and the log-mass. The arguments are those of `attend.attend`."""
    del query_mask  # A plan has no tile for a masked query.
    start = None
    if call.stretches is not None:
        out, log_mass = dense.forward(call.stretches, call.scale, query, key, value, key_mask)
        start = out.reshape(-1, out.shape[-1]), log_mass.reshape(-1)
    if plan is not None:
        plan = tiles.interleave(plan, key.shape[0] * key.shape[2])
        start = tiles.forward(
            plan,
            call.scale,
            query.reshape(-1, query.shape[-1]),
            key.reshape(-1, key.shape[-1]),
            value.reshape(-1, value.shape[-1]),
            start,
        )
    assert start is not None
    out, log_mass = start
    return out.reshape(query.shape).astype(query.dtype), log_mass.reshape(query.shape[:3])


def backward(
    call: BlockCall,
    query: Array,
    key: Array,
    value: Array,
    plan: TilePlan | None,
    query_mask: Array | None,
    key_mask: Array | None,
    log_mass: Array,
    d_out: Array,
    shift: Array,
) -> tuple[Array, Array, Array]:
    """Returns d_query, d_key and d_value. `one_block.backward` explains `log_mass` and `shift`."""
    del query_mask
    inputs = query, key, value
    # exp(logit - inf) is 0: a query without keys has no weights.
    log_mass = jnp.where(jnp.isneginf(log_mass), jnp.inf, log_mass)
    if call.stretches is None:
        d_query, d_key, d_value = (jnp.zeros(x.shape, jnp.float32) for x in inputs)
    else:
        rows = log_mass, d_out, shift
        d_query, d_key, d_value = dense.backward(call.stretches, call.scale, *inputs, key_mask, *rows)
    if plan is not None:
        flat = (
            query.reshape(-1, query.shape[-1]),
            key.reshape(-1, key.shape[-1]),
            value.reshape(-1, value.shape[-1]),
            log_mass.reshape(-1),
            d_out.reshape(-1, d_out.shape[-1]),
            shift.reshape(-1),
        )
        plan = tiles.interleave(plan, key.shape[0] * key.shape[2])
        start = (
            d_query.reshape(-1, d_query.shape[-1]),
            d_key.reshape(-1, d_key.shape[-1]),
            d_value.reshape(-1, d_value.shape[-1]),
        )
        d_query, d_key, d_value = tiles.backward(plan, call.scale, *flat, start)
    d_query, d_key, d_value = d_query.reshape(query.shape), d_key.reshape(key.shape), d_value.reshape(key.shape)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)
