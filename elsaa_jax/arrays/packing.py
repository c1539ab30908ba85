"""Packs several results of one computation into one array, so that XLA's CPU compiler fuses it.

The compiler turns matrix products, exponentials and sums into one loop over all cores, with only the result in memory,
if the loop contains a sum, contains no select, and has a single output array. So masks are applied by adding -inf or
multiplying by 0, and results that are computed together are stored side by side.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from elsaa_jax.types import Array


@jax.custom_vjp
def pack(*parts: Array) -> tuple[Array, ...]:
    """Returns the same arrays, (A, t, ...), by way of one that holds them side by side; (A, t) becomes (A, t, 1)."""
    widths = [1 if x.ndim == 2 else x.shape[2] for x in parts]
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]

    def place(x: Array, end: int) -> Array:
        if x.ndim == 2:
            return x[..., None] * jnp.eye(1, ends[-1], end - 1, dtype=x.dtype)[None]
        return jnp.pad(x, [(0, 0), (0, 0), (end - x.shape[2], ends[-1] - end)])

    packed = functools.reduce(jnp.add, map(place, parts, ends))
    return tuple(jnp.split(packed, ends[:-1], axis=2))


def _pack_fwd(*parts: Array) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    return pack(*parts), tuple(x.ndim for x in parts)


def _pack_bwd(ranks: tuple[int, ...], cotangents: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(d[..., 0] if rank == 2 else d for rank, d in zip(ranks, cotangents, strict=True))


pack.defvjp(_pack_fwd, _pack_bwd)
