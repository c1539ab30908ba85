"""The plan of causal attention: the levels of the causal split, from one sort.

The whole sequence is sorted once. At half the length, each window parts into two and keeps the order within them: a
stable partition, in linear time. The number of keys of a window with a smaller code than a query is found by search
for the whole sequence, and for the halves by the counts of that partition, as in a wavelet tree. No level sorts or
searches again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.sparse.call import SparseCall
from elsaa_jax.sparse.orders import Sorted, take_along
from elsaa_jax.sparse.pairing import Level, PlanShape, count_valid, place_by_rank, place_in_bucket, tile_plan
from elsaa_jax.types import Array, TilePlan


class Descent(NamedTuple):
    """The state that one level of the causal split hands down to the next.

    Attributes:
      queries: Sort slots of the queries, sorted within windows, (B, X, T * g).
      keys: Tokens sorted within windows, (B, K, S).
      bounds: For each query the number of keys of its own window with a smaller rank, and with a rank that is not
        larger, (B, K, T * g) each. Empty in rank pairing.
    """

    queries: Array
    keys: Array
    bounds: tuple[Array, ...]


def causal_plan(call: SparseCall, tokens: Sorted, query_mask: Array | None, key_mask: Array | None) -> TilePlan:
    """Returns the plan of the levels above stretches of `call.base` tokens, for more keys than that.

    At half-length m, position p belongs to segment p // 2m. It is a key if p // m is even and a query if p // m is
    odd. The levels follow each other from the longest half, because their orders do. All levels have the same static
    shapes, so they are one traced body. The arguments are those of `full.full_plan`.
    """
    del query_mask  # `tokens.slot_mask` is the same, by slot.
    num_queries, num_keys, num_heads, num_kv_heads = call.facts[:4]
    slots, slot_mask, batch = tokens.slots, tokens.slot_mask, len(tokens.keys)
    first, base, each = num_keys - num_queries, call.base, slots.each
    halves = [base << i for i in reversed(range(((num_keys - 1) // base).bit_length()))]
    segments = [-(-num_keys // (2 * m)) for m in halves]
    num_seconds = [seconds_below(num_keys, m) - seconds_below(first, m) for m in halves]
    max_blocks = max(n * -(-m // call.block_size) for n, m in zip(segments, halves, strict=True))
    max_queries = max(num_seconds) * (num_heads // num_kv_heads)
    shape = PlanShape(call.block_size, call.num_neighbors, max_blocks, max_queries)
    first_slot = first * each
    position = first + jnp.arange(num_queries * each, dtype=jnp.int32) // each

    def one_level(above: Descent, half: Array) -> tuple[Descent, TilePlan]:
        half_slots = half * each
        queries, _ = split_windows(above.queries, half_slots, first_slot)
        keys, before = split_windows(above.keys, half, 0)
        window, is_second = position // (2 * half), (position // half % 2 == 1)[None, None]
        bounds = [split_bounds(bound, before, window, half) for bound in above.bounds]
        below = tuple([jnp.where(is_second, second_half, first_half) for first_half, second_half in bounds])
        blocks_per_segment = (half + call.block_size - 1) // call.block_size
        starts = 2 * half * jnp.arange(max(segments), dtype=jnp.int32)
        key_counts = count_valid(key_mask, (batch, num_keys), starts, starts + half)

        # Slot i of all second halves, which lie at the end of their windows.
        index = jnp.arange(max(num_seconds) * each, dtype=jnp.int32) + seconds_below(first_slot, half_slots)
        segment = index // half_slots
        start = (2 * segment + 1) * half_slots - first_slot
        place = start + index % half_slots
        chosen = take_along(queries, place[None, None])
        query_counts = count_valid(slot_mask, (batch, num_queries * each), start, start + half_slots)[:, None]
        r = (place - jnp.maximum(start, 0))[None, None]
        if call.pairing == "rank":
            num_keys_of = jnp.take(key_counts, segment, axis=1, mode="clip")[:, None]
            key_place = place_by_rank(r, query_counts, num_keys_of)
            block = (segment * blocks_per_segment)[None, None] + key_place // call.block_size
        else:
            (lo, _), (hi, _) = bounds
            num_keys_of = jnp.take(key_counts, window, axis=1, mode="clip")[:, None]
            key_place = place_in_bucket(lo, hi, (position % half)[None, None], half, num_keys_of)
            block = take_along((window * blocks_per_segment)[None, None] + key_place // call.block_size, chosen)
        # Past the last query, the blocks must stay sorted.
        block = jnp.where((place < queries.shape[2])[None, None], block, shape.max_blocks)
        level = Level(chosen, r < query_counts, block, keys, key_counts, 2 * half, blocks_per_segment)
        return Descent(queries, keys, below), tile_plan(level, slots, shape)

    descent = Descent(tokens.queries, tokens.keys, tokens.bounds)
    _, plan = lax.scan(one_level, descent, jnp.asarray(halves, jnp.int32))
    with_queries = [i for i, number in enumerate(num_seconds) if number]
    if len(with_queries) == len(halves):
        return plan
    return jax.tree.map(lambda x: x[jnp.asarray(with_queries, jnp.int32)], plan)


def split_windows(order: Array, half: Array, first: int) -> tuple[Array, Array]:
    """Parts each window of 2 * half positions, aligned at 0, into its halves.

    Args:
      order: Tokens sorted within windows, (B, heads, n). Token t has the position first + t.
      half: Half-length m, a scalar.
      first: Position of token 0.

    Returns:
      The order within the halves, and the number of tokens of second halves before each place of the given order,
      (B, heads, n + 1).
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
    """Parts counts of the first keys of a window into those of its first and those of its second half.

    Args:
      bounds: Counts, (B, K, X).
      before: Counts that `split_windows` returns for keys that begin at position 0, (B, K, S + 1).
      window: Index of the window of 2 * half positions, (X,).
      half: Half-length m, a scalar.
    """
    place = bounds + (2 * half * window)[None, None]
    seconds = take_along(before, place) - (half * window)[None, None]
    return bounds - seconds, seconds


def seconds_below(position: int, half: Any) -> Any:
    """Counts the p < position that lie in the second half of their window of 2 * half positions."""
    rest = position % (2 * half) - half
    return position // (2 * half) * half + (rest + abs(rest)) // 2
