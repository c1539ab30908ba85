"""Rows and chunks of sequences, as the branches lay them out."""

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


def flatten(x: Array) -> Array:
    """(B, tokens, heads, ...) -> (B * tokens * heads, ...)."""
    return x.reshape(-1, *x.shape[3:])


def split_chunks(x: Array, size: int, start: int = 0) -> Array:
    """(B, tokens, ...) -> (chunks, B * C, ...); the tokens begin at place `start` of the first chunk.

    Batch and chunk are one axis, since XLA copies the input of a loop that has an axis of size 1.
    """
    batch = x.shape[0]
    x = pad_axis(x, 1, start, -(start + x.shape[1]) % size)
    x = jnp.moveaxis(x.reshape(batch, -1, size, *x.shape[2:]), 1, 0)
    return x.reshape(-1, batch * size, *x.shape[3:])


def fold(chunks: Sequence[Array], number: int) -> list[Array]:
    """Several chunks in one, of each array: (chunks, rows, ...) -> (chunks / number, number * rows, ...)."""
    return [x.reshape(-1, number * x.shape[1], *x.shape[2:]) for x in chunks]


def unfold(chunk: Sequence[Array], batch: int) -> list[Array]:
    """One chunk of `split_chunks`, of each array: (B * C, ...) -> (B, C, ...)."""
    return [x.reshape(batch, -1, *x.shape[1:]) for x in chunk]


def join_chunks(x: Array, length: int, start: int = 0) -> Array:
    """(chunks, B, C, ...) -> (B, length, ...), of tokens that begin at place `start` of the first chunk."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, start : start + length]


def largest_divisor(number: int, bound: int) -> int:
    """The largest divisor of `number` that is at most `bound`, and at least 1."""
    return next(d for d in range(max(1, min(number, bound)), 0, -1) if number % d == 0)


def equal_size(number: int, bound: int) -> int:
    """The size, at most `bound`, of the fewest groups that hold `number`: all alike, so that the last has few gaps."""
    return -(-number // -(-number // max(1, bound)))


def to_head_rows(x: Array, num_kv_heads: int) -> Array:
    """(B, C, K * G, ...) -> (B * K, G * C, ...): what one key/value head serves, as one row."""
    batch, length = x.shape[:2]
    x = x.reshape(batch, length, num_kv_heads, -1, *x.shape[3:])
    x = jnp.moveaxis(x, 1, 3)
    return x.reshape(batch * num_kv_heads, -1, *x.shape[4:])


def from_head_rows(x: Array, num_kv_heads: int, length: int) -> Array:
    """The inverse of `to_head_rows`: (B * K, G * C, ...) -> (B, C, K * G, ...)."""
    x = x.reshape(-1, num_kv_heads, x.shape[1] // length, length, *x.shape[2:])
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def past_of_rows(num_rows: int, length: int) -> Array:
    """(G * C, C) bool: which keys of its chunk a query may see."""
    place = jnp.arange(num_rows, dtype=jnp.int32) % length
    return jnp.arange(length, dtype=jnp.int32)[None, :] <= place[:, None]
