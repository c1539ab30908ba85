"""The sparse branch and exact attention by the block attention kernels of `pallas_kernels`.

Stretches of keys that attend to themselves (the base of the causal split, or all of exact attention)
and the levels of a `TilePlan` are merged call by call into the same memory.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from elsaa_jax.arrays.chunks import flatten, pad_axis
from elsaa_jax.blocks.kernel_plans import Stretch, kernel_plan, stretch_plan
from elsaa_jax.types import Array, DType, TilePlan
from pallas_kernels import block_attention
from pallas_kernels.configs import Arithmetic, Launcher, Settings, settings_of


class Layout(NamedTuple):
    """The static part of a call.

    Attributes:
      scale: factor of the logits.
      stretch: keys that attend to themselves in stretches of this length; None: there is only the plan.
      is_causal: whether a query sees its past alone within a stretch.
      target: compute capability, 90 for 9.0.
      arithmetic: "gpu", or what the interpreter does.
      launcher: "pallas", or "jax-triton" for the forward pass.
    """

    scale: float
    stretch: int | None
    is_causal: bool
    target: int
    arithmetic: Arithmetic
    launcher: Launcher

    def settings(self, kernel: str, x: Array) -> Settings:
        """The settings of a kernel for arrays like `x`."""
        settings = settings_of(kernel, x.dtype.name, x.shape[-1], self.target)
        return settings._replace(arithmetic=self.arithmetic, launcher=self.launcher)


def forward(
    layout: Layout,
    query: Array,
    key: Array,
    value: Array,
    plan: TilePlan | None,
    query_mask: Array | None,
    key_mask: Array | None,
) -> tuple[Array, Array]:
    """out (B, T, N, H), in the query's dtype, and log_mass (B, T, N), over the stretches and the plan.

    Args:
      layout: what is static.
      query: (B, T, N, H).
      key: (B, S, K, H).
      value: (B, S, K, H).
      plan: of `plans`, or None.
      query_mask: (B, T).
      key_mask: (B, S).
    """
    settings = layout.settings("block_forward", query)
    # A masked query is in no tile of a plan, and neither is one all of whose keys are masked.
    masked = query_mask is not None or key_mask is not None
    rows = flatten(query), flatten(key), flatten(value)
    dtype = _sum_dtype(layout, query, plan)
    state: tuple[Array, Array] | None = None
    if layout.stretch is not None:
        stretches, geometry = _stretches(layout, query, key, key_mask, settings)
        state = block_attention.forward(stretches, *rows, None, dtype, geometry, settings)
    elif masked:
        state = jnp.zeros(rows[0].shape, dtype), jnp.full(len(rows[0]), -jnp.inf, jnp.float32)
    if plan is not None:
        geometry = block_attention.Geometry(layout.scale, None)

        def attend(state, level):
            return block_attention.forward(level, *rows, state, dtype, geometry, settings)

        state = _over_levels(attend, state, _levels(plan, query, key, settings))
    assert state is not None
    out, log_mass = state
    return out.astype(query.dtype).reshape(query.shape), log_mass.reshape(query.shape[:3])


def backward(
    layout: Layout,
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
    """d_query, d_key and d_value in the dtype of the arrays; see `blocks.backward`."""
    # exp(logit - inf) is 0: a query without keys has no weights.
    log_mass = jnp.where(jnp.isneginf(log_mass), jnp.inf, log_mass)
    rows = flatten(query), flatten(key), flatten(value), flatten(log_mass), flatten(d_out), flatten(shift)
    dtype = _sum_dtype(layout, query, plan)
    of_query, of_key = (layout.settings(f"block_backward_{side}", query) for side in ("query", "key"))
    masked = query_mask is not None or key_mask is not None
    d_query = jnp.zeros(rows[0].shape, dtype) if layout.stretch is None and masked else None
    d_keys: tuple[Array, Array] | None = None
    if key_mask is not None or _first_stretch(layout, query, key):
        d_keys = jnp.zeros(rows[1].shape, dtype), jnp.zeros(rows[2].shape, dtype)
    if layout.stretch is not None:
        stretches, geometry = _stretches(layout, query, key, key_mask, of_query)
        d_query = block_attention.backward_query(stretches, *rows, None, dtype, geometry, of_query)
        stretches, geometry = _stretches(layout, query, key, key_mask, of_key)
        d_keys = block_attention.backward_key(stretches, *rows, d_keys, dtype, geometry, of_key)
    if plan is not None:
        geometry = block_attention.Geometry(layout.scale, None)

        def derive_query(d_query, level):
            return block_attention.backward_query(level, *rows, d_query, dtype, geometry, of_query)

        def derive_keys(d_keys, level):
            return block_attention.backward_key(level, *rows, d_keys, dtype, geometry, of_key)

        d_query = _over_levels(derive_query, d_query, _levels(plan, query, key, of_query))
        d_keys = _over_levels(derive_keys, d_keys, _levels(plan, query, key, of_key))
    assert d_query is not None
    assert d_keys is not None
    d_query, d_key, d_value = (
        d.reshape(x.shape).astype(x.dtype) for d, x in zip((d_query, *d_keys), (query, key, value), strict=True)
    )
    return d_query, d_key, d_value


def _sum_dtype(layout: Layout, query: Array, plan: TilePlan | None) -> DType:
    """Of what several calls add to: float32; of what one call writes: that of the arrays."""
    return query.dtype if layout.stretch is None or plan is None else jnp.float32


def _over_levels(step, state, plans: block_attention.Plan):
    """`step` from level to level, each of which starts from what the last one left."""
    if plans.query_rows.shape[0] == 1:
        return step(state, block_attention.Plan(*(x[0] for x in plans)))
    return lax.scan(lambda state, level: (step(state, level), None), state, plans)[0]


def _levels(plan: TilePlan, query: Array, key: Array, settings: Settings) -> block_attention.Plan:
    num_queries, num_keys = query.size // query.shape[-1], key.size // key.shape[-1]
    return kernel_plan(plan, num_queries, num_keys, key.shape[0] * key.shape[2], settings)


def _first_stretch(layout: Layout, query: Array, key: Array) -> int:
    """Where the first stretch with a query begins."""
    if layout.stretch is None or not layout.is_causal:
        return 0
    return (key.shape[1] - query.shape[1]) // layout.stretch * layout.stretch


def _stretches(
    layout: Layout, query: Array, key: Array, key_mask: Array | None, settings: Settings
) -> tuple[block_attention.Plan, block_attention.Geometry]:
    """The plan of the stretches that hold a query: (B, K, stretches) rows, and who sees whom within them."""
    assert layout.stretch is not None
    (batch, num_queries, num_heads, _), (_, num_keys, num_kv_heads, _) = query.shape, key.shape
    first = _first_stretch(layout, query, key)
    group, number = num_heads // num_kv_heads, -(-(num_keys - first) // layout.stretch)
    # One stretch is taken as it is, with the queries at its end; several are whole, with queries at all places.
    length = num_keys - first if number == 1 else layout.stretch
    before = num_keys - num_queries - first if number > 1 else 0
    count = num_queries if number == 1 else length
    no_query, no_key = batch * num_queries * num_heads, batch * num_keys * num_kv_heads

    query_rows = jnp.arange(no_query, dtype=jnp.int32).reshape(batch, num_queries, num_kv_heads, group)
    query_rows = pad_axis(query_rows, 1, before, number * count - before - num_queries, no_query)
    query_rows = jnp.moveaxis(query_rows, 2, 1).reshape(-1, count * group)
    key_rows = jnp.arange(no_key, dtype=jnp.int32).reshape(batch, num_keys, num_kv_heads)
    if key_mask is not None:
        key_rows = jnp.where(key_mask[:, :, None], key_rows, no_key)
    key_rows = pad_axis(key_rows[:, first:], 1, 0, number * length - (num_keys - first), no_key)
    key_rows = jnp.moveaxis(key_rows, 2, 1).reshape(-1, length)
    stretch = Stretch(count, length, group, layout.is_causal)
    causal = block_attention.Causal(num_queries, num_keys, num_heads, num_kv_heads) if layout.is_causal else None
    plan = stretch_plan(query_rows, key_rows, stretch, no_query, no_key, settings)
    return plan, block_attention.Geometry(layout.scale, causal)
