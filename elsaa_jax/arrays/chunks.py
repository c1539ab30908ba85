"""Rows and chunks of sequences."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from elsaa_jax.types import Array


def pad_axis(x: Array, axis: int, before: int, after: int, fill: float | bool = 0) -> Array:
    """Pads one axis of `x` with `fill`."""
    if not before and not after:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, after)
    return jnp.pad(x, widths, constant_values=fill)


def split_chunks(x: Array, size: int, start: int = 0) -> Array:
    """Cuts (B, tokens, ...) into (chunks, B * C, ...); the tokens begin at place `start` of the first chunk.

    Batch and chunk are one axis, because XLA copies the input of a loop that has an axis of size 1.
    """
    batch = x.shape[0]
    x = pad_axis(x, 1, start, -(start + x.shape[1]) % size)
    x = jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)
    return x.reshape(-1, batch * size, *x.shape[3:])


def fold(chunks: Sequence[Array], number: int) -> list[Array]:
    """Joins `number` chunks of each array: (chunks, rows, ...) -> (chunks / number, number * rows, ...)."""
    return [x.reshape(-1, number * x.shape[1], *x.shape[2:]) for x in chunks]


def unfold(chunk: Sequence[Array], batch: int) -> list[Array]:
    """Separates batch and tokens of one chunk of each array: (B * C, ...) -> (B, C, ...)."""
    return [x.reshape(batch, -1, *x.shape[1:]) for x in chunk]


def join_chunks(x: Array, length: int, start: int = 0) -> Array:
    """Joins chunks (chunks, B, C, ...) to (B, length, ...); the tokens begin at place `start` of the first chunk."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, start : start + length]


def largest_divisor(number: int, bound: int) -> int:
    """Returns the largest divisor of `number` that is at most `bound`, or 1."""
    return next(d for d in range(max(1, min(number, bound)), 0, -1) if number % d == 0)


def equal_size(number: int, bound: int) -> int:
    """Returns the size, at most `bound`, of the fewest groups of equal size that hold `number`, with little padding."""
    return -(-number // -(-number // max(1, bound)))


def to_head_rows(x: Array, num_kv_heads: int) -> Array:
    """Transposes (B, C, K * G, ...) to (B * K, G * C, ...): one row for each key/value head."""
    batch, length = x.shape[:2]
    x = x.reshape(batch, length, num_kv_heads, -1, *x.shape[3:])
    x = jnp.moveaxis(x, 1, 3)
    return x.reshape(batch * num_kv_heads, -1, *x.shape[4:])


def from_head_rows(x: Array, num_kv_heads: int, length: int) -> Array:
    """Undoes `to_head_rows`: (B * K, G * C, ...) -> (B, C, K * G, ...)."""
    x = x.reshape(-1, num_kv_heads, x.shape[1] // length, length, *x.shape[2:])
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def past_of_rows(num_rows: int, length: int) -> Array:
    """Returns which keys of its chunk each query may see, (G * C, C) bool."""
    place = jnp.arange(num_rows, dtype=jnp.int32) % length
    return jnp.arange(length, dtype=jnp.int32)[None, :] <= place[:, None]
