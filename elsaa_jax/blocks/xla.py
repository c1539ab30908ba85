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
    width = query.shape[-1]
    rows = query.reshape(-1, width), key.reshape(-1, width), value.reshape(-1, width)
    start = None
    if call.stretches is not None:
        out, log_mass = dense.forward(call.stretches, call.scale, query, key, value, key_mask)
        start = out.reshape(-1, width), log_mass.reshape(-1)
    if plan is not None:
        plan = tiles.interleave(plan, key.shape[0] * key.shape[2])
        start = tiles.forward(plan, call.scale, *rows, start)
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
    # exp(logit - inf) is 0: a query without keys has no weights.
    log_mass = jnp.where(jnp.isneginf(log_mass), jnp.inf, log_mass)
    if call.stretches is None:
        zeros = jnp.zeros(key.shape, jnp.float32)
        d_query, d_key, d_value = jnp.zeros(query.shape, jnp.float32), zeros, zeros
    else:
        numbers = log_mass, d_out, shift
        d_query, d_key, d_value = dense.backward(call.stretches, call.scale, query, key, value, key_mask, *numbers)
    if plan is not None:
        width = query.shape[-1]
        rows = query.reshape(-1, width), key.reshape(-1, width), value.reshape(-1, width)
        numbers = log_mass.reshape(-1), d_out.reshape(-1, width), shift.reshape(-1)
        start = d_query.reshape(-1, width), d_key.reshape(-1, width), d_value.reshape(-1, width)
        plan = tiles.interleave(plan, key.shape[0] * key.shape[2])
        d_query, d_key, d_value = tiles.backward(plan, call.scale, *rows, *numbers, start)
    d_query, d_key, d_value = d_query.reshape(query.shape), d_key.reshape(key.shape), d_value.reshape(key.shape)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)
