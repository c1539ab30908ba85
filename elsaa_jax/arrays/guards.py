"""Guards on the inputs of an attention: masked tokens, and derivatives that the attentions do not have.

Forward mode and second derivatives are refused with a clear message. The attentions are differentiated by custom VJPs,
which JAX's forward mode cannot use, and their backward passes are written for speed, not to be differentiated again.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from elsaa_jax.types import Array

Tree = TypeVar("Tree")

FORWARD_MODE = (
    "this attention of elsaa_jax has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize); use reverse "
    "mode (jax.grad, jax.vjp, jax.jacrev), or the quadratic definitions in elsaa_jax.reference, which have both"
)
SECOND_DERIVATIVE = (
    "this attention of elsaa_jax has no second derivative (jax.hessian, jax.grad of jax.grad); use the quadratic "
    "definitions in elsaa_jax.reference, which can be differentiated any number of times"
)


def guard_inputs(
    query: Array, key: Array, value: Array, query_mask: Array | None, key_mask: Array | None
) -> tuple[Array, Array, Array]:
    """Returns the inputs of an attention with a custom VJP: masked tokens are 0, and forward mode is refused."""
    return zero_masked(*reverse_only((query, key, value)), query_mask, key_mask)


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


def reverse_only(tree: Tree) -> Tree:
    """Returns the arrays unchanged; their forward-mode derivative raises a TypeError that says what to use."""
    return jax.tree.map(lambda x: _identity.bind(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def first_order_only(tree: Tree) -> Tree:
    """Returns the arrays unchanged; differentiating them raises a TypeError that says what to use."""
    return jax.tree.map(lambda x: _first_order(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@jax.custom_jvp
def _first_order(x: Any) -> Any:
    return x


@_first_order.defjvp
def _first_order_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    raise TypeError(SECOND_DERIVATIVE)


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError(FORWARD_MODE)


# The identity. It is a primitive rather than a `jax.custom_jvp`, so that `jax.vmap` keeps it whole and the identity on
# its tangents is batched in forward mode only.
_identity = Primitive("elsaa_reverse_mode_only")
_identity.def_abstract_eval(lambda x: x)
_identity.def_impl(lambda x: x)
mlir.register_lowering(_identity, lambda _, x: [x])
# The primal is passed on as it is: as a result of its own it would be kept for the backward pass once more.
ad.primitive_jvps[_identity] = lambda primals, tangents: (primals[0], _tangent_of(*tangents))
batching.primitive_batchers[_identity] = lambda args, axes: (_identity.bind(*args), axes[0])

# The identity on tangents. Reverse mode only transposes it; forward mode must evaluate, lower or batch it: all raise.
_tangent = Primitive("elsaa_reverse_mode_only_tangent")
_tangent.def_abstract_eval(lambda x: x)
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent] = _refuse


def _tangent_of(tangent: Any) -> Any:
    return tangent if isinstance(tangent, ad.Zero) else _tangent.bind(tangent)
