"""Checks of array arguments; every failure names the argument, its value and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elsaa_jax.types import Array

MAX_ROWS = 2**31 - 1


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


def check_qkv(query: Array, key: Array, value: Array, is_causal: bool) -> None:
    """Checks query (B, T, N, H) and key, value (B, S, K, H) against each other."""
    for name, x, axes in (("query", query, "B, T, N, H"), ("key", key, "B, S, K, H"), ("value", value, "B, S, K, H")):
        if jnp.ndim(x) != 4 or 0 in jnp.shape(x):
            raise ValueError(f"{name} has shape {jnp.shape(x)}; it must be ({axes}) with no empty axis")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}; it must be a float dtype")
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
    rows = max(query.shape[0] * query.shape[1] * query.shape[2], key.shape[0] * key.shape[1] * key.shape[2])
    if rows > MAX_ROWS:
        raise ValueError(f"batch x length x heads is {rows}; it must be at most {MAX_ROWS}: split the batch")


def check_mask(name: str, mask: Array | None, batch: int, length: int) -> None:
    """Checks a (B, S) or (B, T) boolean mask."""
    if mask is None:
        return
    if jnp.shape(mask) != (batch, length):
        raise ValueError(
            f"{name} has shape {jnp.shape(mask)}; it must be (batch, length) = {(batch, length)}. Masks over pairs "
            "of tokens do not exist here: use is_causal for causality and key_mask for padding"
        )
    if mask.dtype != jnp.bool_:
        raise ValueError(f"{name} has dtype {mask.dtype}; it must be bool, True = attend")


def resolve_scale(scale: Any, head_dim: int) -> float:
    """The factor of the logits, H**-0.5 unless given."""
    if scale is None:
        return head_dim**-0.5
    if not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ValueError(f"scale is {scale!r}; it must be a finite number, or None for head_dim**-0.5")
    return float(scale)


def check_scalar(name: str, value: Any, *, positive: bool = False) -> None:
    """Checks a scalar that may be traced; its value is looked at only where it is concrete."""
    if jnp.ndim(value) != 0:
        raise ValueError(f"{name} has shape {jnp.shape(value)}; it must be a scalar")
    if isinstance(value, jax.core.Tracer):
        return
    if not math.isfinite(float(value)) or float(value) < 0 or (positive and float(value) == 0):
        raise ValueError(f"{name} is {value!r}; it must be a finite number {'>' if positive else '>='} 0")


def zero_masked_keys(key_mask: Array | None, key: Array, value: Array) -> tuple[Array, Array]:
    """Keys and values that are 0 where masked: 0 * NaN must not reach a sum."""
    if key_mask is None:
        return key, value
    keep = key_mask[:, :, None, None]
    return jnp.where(keep, key, 0), jnp.where(keep, value, 0)


def finite_masked_queries(query_mask: Array | None, query: Array) -> Array:
    """Queries that are 0 where masked and no number."""
    if query_mask is None:
        return query
    return jnp.where(query_mask[:, :, None, None] | jnp.isfinite(query), query, 0)
