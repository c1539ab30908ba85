"""Attention within stretches and over a plan, in XLA. `kernels` is the same by GPU kernels."""

from __future__ import annotations

import jax.numpy as jnp

from elsaa_jax.arrays.chunks import flatten
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
        start = flatten(out), flatten(log_mass)
    if plan is not None:
        plan = tiles.interleave(plan, key.shape[0] * key.shape[2])
        start = tiles.forward(plan, call.scale, flatten(query), flatten(key), flatten(value), start)
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
        flat = flatten(query), flatten(key), flatten(value), flatten(log_mass), flatten(d_out), flatten(shift)
        plan = tiles.interleave(plan, key.shape[0] * key.shape[2])
        start = flatten(d_query), flatten(d_key), flatten(d_value)
        d_query, d_key, d_value = tiles.backward(plan, call.scale, *flat, start)
    d_query, d_key, d_value = (
        d.reshape(x.shape).astype(x.dtype) for d, x in zip((d_query, d_key, d_value), inputs, strict=True)
    )
    return d_query, d_key, d_value
