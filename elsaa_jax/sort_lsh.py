"""The sparse branch: hash, sort, and attend exactly within blocks (Alg. 5 and 6 of the paper)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax import checks, dispatch, exact, tiles
from elsaa_jax.config import check_choice, check_int
from elsaa_jax.hashing import gray_rank, hard_codes
from elsaa_jax.plans import causal_plan, full_plan
from elsaa_jax.types import Array, BranchOutput, Implementation, Pairing


def sort_lsh_attention(
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    *,
    block_size: int = 256,
    min_length: int = 0,
    num_neighbors: int = 0,
    pairing: Pairing | None = None,
    is_causal: bool = False,
    query_mask: Array | None = None,
    key_mask: Array | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> BranchOutput:
    """Exact attention of each query to one block of keys with similar hash codes.

    Not causal: queries and keys are sorted by the Gray rank of their codes and paired block by
    block. Causal: exact attention within stretches of N0 tokens, and, at half-lengths N0, 2 N0,
    4 N0, ... aligned at 0, the second half of each stretch attends to the first, which lies
    wholly in its past; all parts are merged by their log-sum-exp. N0 is `min_length`, or
    `block_size` where that is 0.

    Args:
      query: (B, T, N, H).
      key: (B, S, K, H).
      value: (B, S, K, H).
      planes: (P, H), or (K, P, H) with one set for each key/value head.
      block_size: keys of a block; the last one may be short.
      min_length: up to this many keys attention is exact.
      num_neighbors: further blocks that a query attends to, on each side of its own.
      pairing: "rank": the query of rank r of n_q meets the key of rank floor(r n_k / n_q) (the
        paper's; where causal, a later query can move an earlier one to another block: it leaks).
        "bucket": each query takes the block where its own code lies among the keys, spread over
        its bucket by its position: strictly causal. None: "bucket" where causal, else "rank".
      is_causal: query i is the (S - T + i)-th position and attends to positions up to its own.
      query_mask: (B, T) bool; a masked query has no keys and moves no other.
      key_mask: (B, S) bool, True = attend.
      scale: factor of the logits; H**-0.5 where None.
      implementation: see `elsaa_jax.dispatch`.

    Returns:
      out (B, T, N, H), and log_mass (B, T, N), the log-sum-exp of the logits that were seen.
    """
    branch = sort_lsh_branch(
        query,
        key,
        value,
        planes,
        block_size=block_size,
        min_length=min_length,
        num_neighbors=num_neighbors,
        pairing=pairing,
        is_causal=is_causal,
        query_mask=query_mask,
        key_mask=key_mask,
        scale=scale,
        implementation=implementation,
    )
    return branch[0]


def sort_lsh_branch(
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    *,
    block_size: int,
    min_length: int,
    num_neighbors: int,
    pairing: Pairing | None,
    is_causal: bool,
    query_mask: Array | None,
    key_mask: Array | None,
    scale: float | None,
    implementation: Implementation | None,
) -> tuple[BranchOutput, Callable[[], Array]]:
    """`sort_lsh_attention`, and a function that counts the keys (B, T, N) that each query saw."""
    checks.check_qkv(query, key, value, is_causal)
    checks.check_mask("query_mask", query_mask, query.shape[0], query.shape[1])
    checks.check_mask("key_mask", key_mask, key.shape[0], key.shape[1])
    check_int("block_size", block_size, 1)
    check_int("min_length", min_length, 0)
    check_int("num_neighbors", num_neighbors, 0)
    check_choice("pairing", pairing, (None, "rank", "bucket"))
    scale = checks.resolve_scale(scale, query.shape[-1])
    dispatch.resolve("sort_lsh_attention", implementation)
    ranks = _gray_ranks(query, key, planes)
    key, value = checks.zero_masked(key, value, key_mask)

    base = (min_length or block_size) if is_causal else min_length
    if key.shape[1] <= base:
        whole = exact.exact_attention(query, key, value, is_causal=is_causal, key_mask=key_mask, scale=scale)
        return _mask_queries(whole, query_mask), lambda: count_keys(query, key.shape[1], is_causal, key_mask)

    plan_of = functools.partial(causal_plan, base=base) if is_causal else full_plan
    plan = plan_of(
        *ranks,
        num_bits=planes.shape[-2],
        block_size=block_size,
        num_neighbors=num_neighbors,
        pairing=pairing or ("bucket" if is_causal else "rank"),
        query_mask=query_mask,
        key_mask=key_mask,
    )
    stretches = Stretches(base, query.shape[1], key.shape[1]) if is_causal else None
    out, log_mass = _attend((scale, stretches), query, key, value, plan, key_mask)

    def support() -> Array:
        size = tiles.support_size(plan, query.size // query.shape[-1], key.size // key.shape[-1])
        size = size.reshape(query.shape[:3])
        return size if stretches is None else size + stretches.count_keys(query, key, key_mask)

    return _mask_queries(BranchOutput(out.astype(query.dtype), log_mass), query_mask), support


def _gray_ranks(query: Array, key: Array, planes: Array) -> tuple[Array, Array]:
    """Gray ranks of the codes, (B, N, T) and (B, K, S); computed once, never differentiated."""
    num_kv_heads, head_dim = key.shape[2:]
    if planes.ndim not in (2, 3) or planes.shape[-1] != head_dim or (planes.ndim == 3 and len(planes) != num_kv_heads):
        raise ValueError(
            f"planes has shape {planes.shape}; it must be (bits, {head_dim}), or ({num_kv_heads}, bits, {head_dim}) "
            "with one set for each key/value head"
        )
    query_planes = planes if planes.ndim == 2 else jnp.repeat(planes, query.shape[2] // num_kv_heads, axis=0)

    def ranks(x: Array, planes: Array) -> Array:
        codes = hard_codes(*lax.stop_gradient((x, planes)))
        return gray_rank(codes, planes.shape[-2]).swapaxes(1, 2)

    return ranks(query, query_planes), ranks(key, planes)


def _mask_queries(branch: BranchOutput, query_mask: Array | None) -> BranchOutput:
    if query_mask is None:
        return branch
    keep = query_mask[:, :, None]
    return BranchOutput(jnp.where(keep[..., None], branch.out, 0), jnp.where(keep, branch.log_mass, -jnp.inf))


def count_keys(query: Array, num_keys: int, is_causal: bool, key_mask: Array | None) -> Array:
    """How many keys each query sees where it sees all it may: (B, T, N) float32."""
    batch, num_queries, num_heads, _ = query.shape
    valid = jnp.ones((batch, num_keys), bool) if key_mask is None else key_mask
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    count = count[:, num_keys - num_queries :] if is_causal else jnp.broadcast_to(count[:, -1:], (batch, num_queries))
    return jnp.broadcast_to(count[:, :, None], query.shape[:3]).astype(jnp.float32)


class Stretches(NamedTuple):
    """The stretches of N0 tokens, aligned at 0, in which causal attention is exact.

    Only those that hold one of the T queries, which are the last of S positions, are computed:
    they become batch entries, (B, T, ...) <-> (B * stretches, N0, ...).
    """

    base: int  # N0
    num_queries: int  # T
    num_keys: int  # S

    @property
    def first(self) -> int:
        """Where the first stretch with a query begins."""
        return (self.num_keys - self.num_queries) // self.base * self.base

    @property
    def count(self) -> int:
        """How many stretches hold a query."""
        return -(-(self.num_keys - self.first) // self.base)

    def split_queries(self, x: Array) -> Array:
        """(B, T, ...) -> (B * stretches, N0, ...), or as it is where there is but one."""
        return self._split(x, self.num_keys - self.num_queries - self.first)

    def split_keys(self, x: Array) -> Array:
        """(B, S, ...) -> (B * stretches, N0, ...), or (B, S - first, ...) where there is but one."""
        return self._split(x[:, self.first :], 0)

    def join_queries(self, x: Array) -> Array:
        """The inverse of `split_queries`."""
        return self._join(x, self.num_keys - self.num_queries - self.first, self.num_queries)

    def join_keys(self, x: Array) -> Array:
        """The transpose of `split_keys`: 0 before the first stretch."""
        x = self._join(x, 0, self.num_keys - self.first)
        return jnp.pad(x, [(0, 0), (self.first, 0)] + [(0, 0)] * (x.ndim - 2))

    def rows(self, query: Array, key: Array, value: Array, key_mask: Array | None):
        """Geometry and arrays of the exact attention within the stretches."""
        query, key, value = self.split_queries(query), self.split_keys(key), self.split_keys(value)
        mask = None if key_mask is None else self.split_keys(key_mask)
        return (query.shape[1], key.shape[1]), exact.to_rows(query, key, value, mask)

    def count_keys(self, query: Array, key: Array, key_mask: Array | None) -> Array:
        """How many keys of its stretch each query sees."""
        query, key = self.split_queries(query), self.split_keys(key)
        mask = None if key_mask is None else self.split_keys(key_mask)
        return self.join_queries(count_keys(query, key.shape[1], True, mask))

    def _split(self, x: Array, before: int) -> Array:
        if self.count == 1:
            return x
        after = self.count * self.base - before - x.shape[1]
        x = jnp.pad(x, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(-1, self.base, *x.shape[2:])

    def _join(self, x: Array, before: int, length: int) -> Array:
        if self.count == 1:
            return x
        return x.reshape(-1, self.count * self.base, *x.shape[2:])[:, before : before + length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, plan, key_mask):
    """out (B, T, N, H) and log_mass (B, T, N) in float32 over all that the plan and the stretches name."""
    scale, stretches = static
    start = None
    if stretches is not None:
        lengths, rows = stretches.rows(query, key, value, key_mask)
        geometry = exact.make_geometry(*lengths, True, scale, key_mask is not None)
        batch = query.shape[0] * stretches.count
        parts = exact.forward(geometry, *rows)
        start = tuple(flat(stretches.join_queries(exact.from_query_rows(x, batch)), 3) for x in parts)
    out, log_mass = tiles.forward(plan, scale, flat(query, 3), flat(key, 3), flat(value, 3), start)
    return out.reshape(query.shape), log_mass.reshape(query.shape[:3])


def _attend_fwd(static, query, key, value, plan, key_mask):
    out, log_mass = _attend(static, query, key, value, plan, key_mask)
    return (out, log_mass), (query, key, value, plan, key_mask, out.astype(query.dtype), log_mass)


def _attend_bwd(static, residuals, cotangents):
    scale, stretches = static
    query, key, value, plan, key_mask, out, log_mass = residuals
    d_out, d_log_mass = cotangents
    shift = exact.row_shift(out, log_mass, d_out, d_log_mass)
    if stretches is None:
        start = tuple(jnp.zeros((x.size // x.shape[-1], x.shape[-1]), jnp.float32) for x in (query, key, value))
    else:
        lengths, rows = stretches.rows(query, key, value, key_mask)
        geometry = exact.make_geometry(*lengths, True, scale, key_mask is not None)
        batch, num_kv_heads = query.shape[0] * stretches.count, key.shape[2]
        # Queries that pad the first and the last stretch have weights, but no cotangent.
        of_rows = (exact.to_query_rows(stretches.split_queries(x), num_kv_heads) for x in (log_mass, d_out, shift))
        d_query, d_key, d_value = exact.backward(geometry, *rows, *of_rows)
        d_query = stretches.join_queries(exact.from_query_rows(d_query, batch))
        d_key, d_value = (stretches.join_keys(exact.from_key_rows(x, batch)) for x in (d_key, d_value))
        start = tuple(flat(x, 3) for x in (d_query, d_key, d_value))
    d_query, d_key, d_value = tiles.backward(
        plan,
        scale,
        flat(query, 3),
        flat(key, 3),
        flat(value, 3),
        flat(log_mass, 3),
        flat(d_out, 3),
        flat(shift, 3),
        start,
    )
    return (
        d_query.reshape(query.shape).astype(query.dtype),
        d_key.reshape(key.shape).astype(key.dtype),
        d_value.reshape(value.shape).astype(value.dtype),
        None,
        None,
    )


_attend.defvjp(_attend_fwd, _attend_bwd)


def flat(x: Array, axes: int) -> Array:
    """The first `axes` axes as one."""
    return x.reshape(-1, *x.shape[axes:])
