"""Attention within stretches and over a plan, by the block attention kernels of `pallas_kernels`.

Each kernel call merges its part, the stretches or one level of the plan, into the memory of the call before it. `xla`
is the same in XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import lax

from elsaa_jax.blocks.call import BlockCall
from elsaa_jax.blocks.kernel_plans import level_plans, stretch_plan
from elsaa_jax.types import Array, DType, TilePlan
from pallas_kernels import block_attention
from pallas_kernels.configs import settings_for

State = TypeVar("State")


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
    settings = settings_for("block_forward", query, *call.route[1:])
    # A masked query is in no tile of a plan, and neither is one all of whose keys are masked.
    masked = query_mask is not None or key_mask is not None
    dtype = _sum_dtype(call, query, plan)
    width = query.shape[-1]
    rows = query.reshape(-1, width), key.reshape(-1, width), value.reshape(-1, width)
    state: tuple[Array, Array] | None = None
    if call.stretches is not None:
        part, geometry = stretch_plan(call, query, key, key_mask, settings)
        state = block_attention.forward(part, *rows, None, dtype, geometry, settings)
    elif masked:
        state = jnp.zeros(rows[0].shape, dtype), jnp.full(len(rows[0]), -jnp.inf, jnp.float32)
    if plan is not None:
        geometry = block_attention.Geometry(call.scale, None)

        def attend(state: tuple[Array, Array] | None, level: block_attention.Plan) -> tuple[Array, Array]:
            return block_attention.forward(level, *rows, state, dtype, geometry, settings)

        state = _over_levels(attend, state, level_plans(plan, query, key, settings))
    assert state is not None
    out, log_mass = state
    return out.astype(query.dtype).reshape(query.shape), log_mass.reshape(query.shape[:3])


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
    # exp(logit - inf) is 0: a query without keys has no weights.
    log_mass = jnp.where(jnp.isneginf(log_mass), jnp.inf, log_mass)
    width = query.shape[-1]
    numbers = log_mass.reshape(-1), d_out.reshape(-1, width), shift.reshape(-1)
    rows = query.reshape(-1, width), key.reshape(-1, width), value.reshape(-1, width), *numbers
    dtype = _sum_dtype(call, query, plan)
    of_query = settings_for("block_backward_query", query, *call.route[1:])
    of_key = settings_for("block_backward_key", query, *call.route[1:])
    masked = query_mask is not None or key_mask is not None
    d_query = jnp.zeros(rows[0].shape, dtype) if call.stretches is None and masked else None
    d_keys: tuple[Array, Array] | None = None
    if key_mask is not None or (call.stretches is not None and call.stretches.first):
        d_keys = jnp.zeros(rows[1].shape, dtype), jnp.zeros(rows[2].shape, dtype)
    if call.stretches is not None:
        part, geometry = stretch_plan(call, query, key, key_mask, of_query)
        d_query = block_attention.backward_query(part, *rows, None, dtype, geometry, of_query)
        part, geometry = stretch_plan(call, query, key, key_mask, of_key)
        d_keys = block_attention.backward_key(part, *rows, d_keys, dtype, geometry, of_key)
    if plan is not None:
        geometry = block_attention.Geometry(call.scale, None)

        def derive_query(d_query: Array | None, level: block_attention.Plan) -> Array:
            return block_attention.backward_query(level, *rows, d_query, dtype, geometry, of_query)

        def derive_keys(d_keys: tuple[Array, Array] | None, level: block_attention.Plan) -> tuple[Array, Array]:
            return block_attention.backward_key(level, *rows, d_keys, dtype, geometry, of_key)

        d_query = _over_levels(derive_query, d_query, level_plans(plan, query, key, of_query))
        d_keys = _over_levels(derive_keys, d_keys, level_plans(plan, query, key, of_key))
    assert d_query is not None
    assert d_keys is not None
    d_query, d_key, d_value = (
        d.reshape(x.shape).astype(x.dtype) for d, x in zip((d_query, *d_keys), (query, key, value), strict=True)
    )
    return d_query, d_key, d_value


def _sum_dtype(call: BlockCall, query: Array, plan: TilePlan | None) -> DType:
    """Returns float32 for sums of several kernel calls, and the dtype of the arrays for the result of one call."""
    return query.dtype if call.stretches is None or plan is None else jnp.float32


def _over_levels(step: Callable[..., State], state: State | None, plans: block_attention.Plan) -> State:
    """Applies `step` to each level in turn; it starts from the result of the level before."""
    if plans.query_rows.shape[0] == 1:
        return step(state, block_attention.Plan(*(x[0] for x in plans)))
    result, _ = lax.scan(lambda state, level: (step(state, level), None), state, plans)
    assert result is not None
    return result
