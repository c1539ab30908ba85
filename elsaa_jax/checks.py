"""Checks of arguments. Every failure is a ValueError that names the argument, its value and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elsaa_jax.types import Array, CallFacts

MAX_ROWS = 2**31 - 1
FLOAT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises ValueError unless `value` is an integer in [low, high]."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        allowed = f">= {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} is {value!r}; it must be an integer {allowed}")


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raises ValueError unless `value` is a finite number in [low, high] (or (low, high])."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        allowed = f"{'>' if open_low else '>='} {low}" + ("" if math.isinf(high) else f" and <= {high}")
        raise ValueError(f"{name} is {value!r}; it must be a finite number {allowed}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} is {value!r}; it must be one of {allowed}")


def check_bool(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False")


def check_instance(name: str, value: Any, kind: type) -> None:
    """Raises ValueError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}; it must be a {kind.__name__}")


def check_call(
    query: Array,
    key: Array,
    value: Array,
    *,
    is_causal: bool,
    query_mask: Array | None = None,
    key_mask: Array | None = None,
    scale: Any = None,
) -> CallFacts:
    """Checks the arguments that all attentions share.

    Args:
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      is_causal: Whether queries are the last T of the S positions and attend to their past only.
      query_mask: Queries that take part, (B, T) bool, or None.
      key_mask: Keys that take part, (B, S) bool, or None.
      scale: Factor of the logits, or None for H**-0.5.

    Returns:
      The static facts of the call.
    """
    for name, x, axes in (("query", query, "B, T, N, H"), ("key", key, "B, S, K, H"), ("value", value, "B, S, K, H")):
        check_array(name, x)
        if len(x.shape) != 4 or 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}; it must be ({axes}) with no empty axis")
        symbolic = [size for size in x.shape if not isinstance(size, int)]
        if symbolic:
            raise ValueError(
                f"{name} has shape {x.shape} with the symbolic dimension {symbolic[0]}; it must be a number. For a "
                "symbolic batch export `jax.vmap` of the function of one example; otherwise export one function for "
                "each size"
            )
        if x.dtype not in FLOAT_DTYPES:
            allowed = ", ".join(jnp.dtype(dtype).name for dtype in FLOAT_DTYPES)
            raise ValueError(f"{name} has dtype {x.dtype}; it must be one of {allowed}")
    if key.shape != value.shape:
        raise ValueError(f"key has shape {key.shape} and value {value.shape}; the two must be equal")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"query has shape {query.shape} and key {key.shape}; batch and head dimension must be equal")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"query has {query.shape[2]} heads and key {key.shape[2]}; the first must be a multiple of the second"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype} and {value.dtype}; they must be equal"
        )
    check_bool("is_causal", is_causal)
    if is_causal and query.shape[1] > key.shape[1]:
        raise ValueError(
            f"query has length {query.shape[1]} and key {key.shape[1]}; with is_causal=True the queries are the "
            "last positions of the keys, so the first must not exceed the second"
        )
    batch = query.shape[0]
    rows = batch * max(query.shape[1] * query.shape[2], key.shape[1] * key.shape[2])
    if rows > MAX_ROWS:
        raise ValueError(f"batch x length x heads is {rows}; it must be at most {MAX_ROWS}: split the batch")
    check_mask("query_mask", query_mask, batch, query.shape[1])
    check_mask("key_mask", key_mask, batch, key.shape[1])
    num_kv_heads, head_dim = key.shape[2:]
    if scale is None:
        scale = head_dim**-0.5
    elif not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ValueError(f"scale is {scale!r}; it must be a finite number, or None for head_dim**-0.5")
    return CallFacts(query.shape[1], key.shape[1], query.shape[2], num_kv_heads, head_dim, is_causal, float(scale))


def check_array(name: str, x: Any) -> None:
    """Raises ValueError unless `x` is an array, of JAX or NumPy."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name} is a {type(x).__name__}; it must be an array: use jnp.asarray")


def check_mask(name: str, mask: Array | None, batch: int, length: int) -> None:
    """Checks a (B, S) or (B, T) boolean mask."""
    if mask is None:
        return
    check_array(name, mask)
    if mask.shape != (batch, length):
        raise ValueError(
            f"{name} has shape {mask.shape}; it must be (batch, length) = {(batch, length)}. Masks over pairs "
            "of tokens do not exist here: use is_causal for causality and key_mask for padding"
        )
    if mask.dtype != jnp.bool_:
        raise ValueError(f"{name} has dtype {mask.dtype}; it must be bool, True = attend")


def check_planes(name: str, planes: Array, axes: tuple[str, ...], facts: CallFacts, max_bits: int) -> None:
    """Checks hash planes (*axes, H), or (K, *axes, H) with one set for each key/value head.

    Args:
      name: Name of the argument.
      planes: Hash planes.
      axes: Names of the axes before H; the last one counts bits.
      facts: Sizes of the call.
      max_bits: Largest number of bits.
    """
    check_array(name, planes)
    shape, shared = planes.shape, len(axes) + 1
    fits = len(shape) == shared or (len(shape) == shared + 1 and shape[0] == facts.num_kv_heads)
    if not fits or shape[-1] != facts.head_dim:
        form = f"{', '.join(axes)}, {facts.head_dim}"
        raise ValueError(
            f"{name} has shape {shape}; it must be ({form}), or ({facts.num_kv_heads}, {form}) with one set for each "
            "key/value head"
        )
    check_int(f"the number of {axes[-1]} of the {name}", shape[-2], 1, max_bits)
    if not isinstance(planes, jax.core.Tracer) and not np.isfinite(np.asarray(planes, np.float32)).all():
        raise ValueError(f"{name} has values that are NaN or infinite; draw them by `elsaa_jax.sample_planes`")


def check_race_planes(name: str, planes: Array, facts: CallFacts, num_ensembles: int, max_bits: int) -> None:
    """Checks planes (M*L, P, H) or (K, M*L, P, H), whose tables M ensembles share equally."""
    check_int("num_ensembles", num_ensembles, 1)
    check_planes(name, planes, ("tables", "bits"), facts, max_bits)
    tables = planes.shape[-3]
    if tables == 0 or tables % num_ensembles:
        raise ValueError(f"num_ensembles is {num_ensembles}; it must divide the {tables} tables of the planes")


def check_shared_bits(num_bits: int, total_planes: int) -> None:
    """Raises ValueError where the sparse branch asks for more planes than the low-rank branch has."""
    if num_bits > total_planes:
        raise ValueError(
            f"SortLshConfig.num_bits is {num_bits}, but the low-rank branch has only {total_planes} planes "
            "(ensembles x tables x bits) to share; use fewer bits, more tables, or planes of its own"
        )


def check_scalar(name: str, value: Any, *, positive: bool = False) -> None:
    """Checks a scalar that may be traced; its value is checked only where it is concrete."""
    if jnp.ndim(value) != 0:
        raise ValueError(f"{name} has shape {jnp.shape(value)}; it must be a scalar")
    if isinstance(value, jax.core.Tracer):
        return
    if not math.isfinite(float(value)) or float(value) < 0 or (positive and float(value) == 0):
        raise ValueError(f"{name} is {value!r}; it must be a finite number {'>' if positive else '>='} 0")


def check_weights(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Checks a gate or a lambda, which broadcasts to `shape` = (B, T, N); values are checked only where concrete."""
    if not isinstance(value, jax.core.Tracer):
        concrete = np.asarray(value, np.float32)
        if not (np.isfinite(concrete).all() and (concrete >= 0).all()):
            raise ValueError(f"{name} has the smallest value {concrete.min()}; all must be finite numbers >= 0")
    found = jnp.shape(value)
    if len(found) > len(shape) or any(a not in (1, b) for a, b in zip(found[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{name} has shape {found}; it must broadcast to (B, T, N) = {shape}")
