"""The tile plan of a whole call of the sparse branch: one level, or the levels of the causal split."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.pairing import Level, PlanShape, Tokens, block_plan, tile_plan
from elsaa_jax.tiles import TilePlan
from elsaa_jax.types import Array, Pairing

# Queries of a tile, where tiles are filled by index: small tiles waste little, large ones run faster.
TILE_SIZE = 64


class BlockRule(NamedTuple):
    """How queries and blocks of keys are paired; see `sort_lsh_attention`."""

    block_size: int
    num_neighbors: int
    pairing: Pairing
    same_mask: bool  # the masks of queries and keys are one


def full_plan(
    query_ranks: Array,
    key_ranks: Array,
    num_bits: int,
    query_mask: Array | None,
    key_mask: Array | None,
    rule: BlockRule,
) -> TilePlan:
    """Every query may meet every key.

    Args:
      query_ranks: (B, N, T), Gray ranks.
      key_ranks: (B, K, S).
      num_bits: P of the hash.
      query_mask: (B, T) or None.
      key_mask: (B, S) or None.
      rule: how queries and blocks are paired.
    """
    batch, _, num_queries = query_ranks.shape
    num_keys = key_ranks.shape[2]

    def tokens(ranks: Array, mask: Array | None) -> Tokens:
        length = ranks.shape[2]
        local = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
        segment = jnp.zeros_like(local) if mask is None else jnp.where(mask, 0, 1)
        return Tokens(ranks, segment, local, 0)

    shape = PlanShape(
        num_bits=num_bits,
        block_size=rule.block_size,
        tile_size=min(TILE_SIZE, num_queries),
        num_neighbors=rule.num_neighbors,
        pairing=rule.pairing,
        max_segments=1,
        max_span=max(num_queries, num_keys),
        max_blocks=-(-num_keys // rule.block_size),
        max_queries=num_queries,
    )
    query, key = tokens(query_ranks, query_mask), tokens(key_ranks, key_mask)
    if rule.pairing == "rank" and num_queries == num_keys and rule.same_mask:
        return block_plan(query, key, shape)
    valid = query.segment == 0
    place = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    count = jnp.maximum(place[:, -1:] + 1, 1)
    fraction = (place.astype(jnp.float32) + 0.5) / count.astype(jnp.float32)
    level = Level(query, key, fraction, shape.max_span, 0, shape.max_blocks)
    return jax.tree.map(lambda x: x[None], tile_plan(level, shape))


def causal_plan(
    query_ranks: Array,
    key_ranks: Array,
    num_bits: int,
    query_mask: Array | None,
    key_mask: Array | None,
    rule: BlockRule,
    base: int,
) -> TilePlan:
    """The levels of the causal split above stretches of `base` tokens; S > base.

    At half-length m the position p belongs to segment p // 2m; it is a key where p // m is even
    and a query where it is odd. All levels have the same static shapes, so that they are one
    traced body.
    """
    batch, _, num_queries = query_ranks.shape
    num_keys = key_ranks.shape[2]
    first = num_keys - num_queries
    halves, half = [], base
    while half < num_keys:
        if _positions_in_second_halves(first, num_keys, half):
            halves.append(half)
        half *= 2
    segments = [-(-num_keys // (2 * m)) for m in halves]
    max_queries = max(_positions_in_second_halves(first, num_keys, m) for m in halves)
    shape = PlanShape(
        num_bits=num_bits,
        block_size=rule.block_size,
        tile_size=min(TILE_SIZE, max_queries),
        num_neighbors=rule.num_neighbors,
        pairing=rule.pairing,
        max_segments=max(segments),
        max_span=max(n * m for n, m in zip(segments, halves, strict=True)),
        max_blocks=max(n * -(-m // rule.block_size) for n, m in zip(segments, halves, strict=True)),
        max_queries=max_queries,
    )

    def tokens(ranks: Array, mask: Array | None, half: Array, is_query: bool) -> Tokens:
        length = ranks.shape[2]
        start = first if is_query else 0
        position = start + jnp.arange(length, dtype=jnp.int32)
        member = (position // half % 2 == int(is_query))[None]
        if mask is not None:
            member = member & mask
        segment = jnp.where(member, (position // (2 * half))[None], shape.max_segments)
        segment, local = (jnp.broadcast_to(x, (batch, length)) for x in (segment, (position % half)[None]))
        return Tokens(ranks, segment, local, half - first if is_query else 0)

    def one_level(half: Array) -> TilePlan:
        query = tokens(query_ranks, query_mask, half, True)
        key = tokens(key_ranks, key_mask, half, False)
        fraction = (query.local.astype(jnp.float32) + 0.5) / half.astype(jnp.float32)
        blocks_per_segment = (half + rule.block_size - 1) // rule.block_size
        return tile_plan(Level(query, key, fraction, half, 2 * half, blocks_per_segment), shape)

    return lax.map(one_level, jnp.asarray(halves, jnp.int32))


def _positions_in_second_halves(first: int, last: int, half: int) -> int:
    """How many p in [first, last) have p // half odd."""

    def below(p: int) -> int:
        return p // (2 * half) * half + max(0, p % (2 * half) - half)

    return below(last) - below(first)
