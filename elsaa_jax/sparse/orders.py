"""Tokens in the order of their hash codes, in windows of any level of the causal split, from one sort.

The whole sequence is sorted once. Half the length of its windows, and each parts into two, the
order within them kept: a stable partition, in linear time. How many keys of a window have a smaller
code than a query is known for the whole sequence by a search, and for the halves by the counts of
that partition, as in a wavelet tree: no level sorts or searches again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.types import Array


class Ranks(NamedTuple):
    """Gray ranks of tokens.

    Attributes:
      values: (B, heads, n); of masked tokens above all others.
      number: how many different ones there may be.
    """

    values: Array
    number: int


def mask_ranks(ranks: Array, mask: Array | None, num_bits: int) -> Ranks:
    """Ranks (B, heads, n) of P bits, 2**P where the mask (B, n) is not set."""
    if mask is None:
        return Ranks(ranks, 2**num_bits)
    return Ranks(jnp.where(mask[:, None, :], ranks, 2**num_bits), 2**num_bits + 1)


def sort_tokens(ranks: Ranks) -> tuple[Array, Array]:
    """Sorts by rank, then place: the token at each place and its rank, (B, heads, n) each."""
    values, length = ranks.values, ranks.values.shape[2]
    token = lax.broadcasted_iota(jnp.int32, values.shape, 2)
    if ranks.number * length <= 2**32:  # One integer sorts several times faster than two.
        packed = lax.sort(values.astype(jnp.uint32) * length + token.astype(jnp.uint32), dimension=2)
        return (packed % length).astype(jnp.int32), (packed // length).astype(jnp.int32)
    values, token = lax.sort((values, token), dimension=2, num_keys=1)
    return token, values


def bucket_bounds(sorted_ranks: Array, ranks: Array) -> tuple[Array, Array]:
    """How many of the sorted ranks (B, K, S) are below each of `ranks` (B, K, X), and how many no greater."""

    def search(above: bool) -> Array:
        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) // 2
            found = take_along(sorted_ranks, middle)
            right = ((found <= ranks) if above else (found < ranks)) & (low < high)
            return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

        length = sorted_ranks.shape[2]
        bounds = jnp.zeros_like(ranks), jnp.full_like(ranks, length)
        return lax.fori_loop(0, length.bit_length(), halve, bounds)[0]

    return search(False), search(True)


def split_windows(order: Array, half: Array, first: int) -> tuple[Array, Array]:
    """Parts each window of 2 * half positions, aligned at 0, into its halves.

    Args:
      order: (B, heads, n), tokens sorted within windows; token t has the position first + t.
      half: () int32.
      first: position of token 0.

    Returns:
      The order within the halves, and (B, heads, n + 1), how many tokens of second halves stand
      before each place of the given order.
    """
    position = first + order
    window, second = position // (2 * half), position // half % 2
    before = jnp.pad(jnp.cumsum(second, axis=2), [(0, 0), (0, 0), (1, 0)])
    # Windows lie one after the other; where the first one begins before `first`, it is cut off.
    start = 2 * half * window - first
    start, middle = jnp.maximum(start, 0), jnp.maximum(start + half, 0)
    seconds = before[..., :-1] - jnp.maximum(half * window - seconds_below(first, half), 0)
    place = lax.broadcasted_iota(jnp.int32, order.shape, 2)
    target = jnp.where(second == 1, middle + seconds, place - seconds)
    put = jax.vmap(jax.vmap(lambda to, x: x.at[to].set(x, unique_indices=True, mode="promise_in_bounds")))
    return put(target, order), before


def split_bounds(bounds: Array, before: Array, window: Array, half: Array) -> tuple[Array, Array]:
    """Counts of the first keys of a window, parted into those of its first and of its second half.

    Args:
      bounds: (B, K, X), how many.
      before: (B, K, S + 1), of `split_windows` for keys that begin at position 0.
      window: (X,), which window of 2 * half positions.
      half: () int32.
    """
    place = bounds + (2 * half * window)[None, None]
    seconds = take_along(before, place) - (half * window)[None, None]
    return bounds - seconds, seconds


def count_valid(mask: Array | None, tokens: Array, start: Array, end: Array | None = None) -> Array:
    """(B, X): how many of the `tokens` (B, heads, n) in [start, end) are not masked; None: to the last one."""
    batch, _, length = tokens.shape
    start, end = (jnp.clip(x, 0, length) for x in (start, jnp.full_like(start, length) if end is None else end))
    if mask is None:
        return jnp.broadcast_to(end - start, (batch, *jnp.broadcast_shapes(end.shape, start.shape)))
    before = jnp.pad(jnp.cumsum(mask, axis=1, dtype=jnp.int32), [(0, 0), (1, 0)])
    return before[:, end] - before[:, start]


def seconds_below(position: int, half: Any) -> Any:
    """How many p < position lie in the second half of their window of 2 * half positions."""
    rest = position % (2 * half) - half
    return position // (2 * half) * half + (rest + abs(rest)) // 2


def take_along(x: Array, index: Array) -> Array:
    """x[b, h, index[b, h, i]], an index past the end clipped; either may have one batch or head for all."""
    shape = jnp.broadcast_shapes(x.shape[:2], index.shape[:2])
    x, index = (jnp.broadcast_to(a, (*shape, a.shape[2])) for a in (x, index))
    return jnp.take_along_axis(x, index, axis=2, mode="clip")
