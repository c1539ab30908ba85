"""Exact attention, block by block: linear memory and a log-sum-exp that can be differentiated."""

from __future__ import annotations

import functools

import jax

from elsaa_jax import dispatch
from elsaa_jax.arrays.guards import guard_inputs
from elsaa_jax.blocks.attend import attend
from elsaa_jax.blocks.call import BlockCall
from elsaa_jax.blocks.stretches import Stretches
from elsaa_jax.checks import check_call
from elsaa_jax.types import Array, BranchOutput, CallFacts, Implementation
from pallas_kernels.configs import block_refusal


def exact_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> BranchOutput:
    """Computes softmax(scale q k^T) v over all keys, or over the past (Eq. 1 and 2 of the paper).

    Args:
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      is_causal: Whether query i, at position S - T + i, attends to positions up to its own only.
      key_mask: Keys that take part, (B, S) bool, True = attend.
      scale: Factor of the logits; H**-0.5 by default.
      implementation: "xla", "pallas" or "interpret"; by default the best for each platform (`elsaa_jax.dispatch`).

    Returns:
      The output (B, T, N, H) and the log-mass (B, T, N), the log-sum-exp of the logits.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax import exact_attention
      >>> x = jnp.ones((1, 8, 2, 16))
      >>> out, log_mass = exact_attention(x, x, x, is_causal=True)
      >>> out.shape, log_mass.shape
      ((1, 8, 2, 16), (1, 8, 2))
    """
    facts = check_call(query, key, value, is_causal=is_causal, key_mask=key_mask, scale=scale)
    call = make_exact(facts, dispatch.route(implementation, block_refusal(query, key)))
    return _exact(call, query, key, value, key_mask)


def make_exact(facts: CallFacts, route: dispatch.Route) -> BlockCall:
    """Returns the call in which one stretch holds all keys."""
    stretches = Stretches(facts.num_keys, facts.num_queries, facts.num_keys, facts.is_causal)
    return BlockCall(facts.scale, stretches, route)


@functools.partial(jax.jit, static_argnums=0)
def _exact(call: BlockCall, query: Array, key: Array, value: Array, key_mask: Array | None) -> BranchOutput:
    query, key, value = guard_inputs(query, key, value, None, key_mask)
    return BranchOutput(*attend(call, query, key, value, None, None, key_mask))
