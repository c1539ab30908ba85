"""Cutting sequences into chunks, for the branches that work by running sums."""

from __future__ import annotations

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
    """(B, tokens, ...) -> (chunks, B, C, ...); the tokens begin at place `start` of the first chunk."""
    x = pad_axis(x, 1, start, -(start + x.shape[1]) % size)
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def join_chunks(x: Array, length: int, start: int = 0) -> Array:
    """The inverse of `split_chunks`: (chunks, B, C, ...) -> (B, length, ...)."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, start : start + length]
