"""The sparse branch: hash, sort, and attend exactly within blocks (Alg. 4 and 5 of the paper)."""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax import checks, dispatch
from elsaa_jax.arrays.chunks import flatten
from elsaa_jax.blocks import exact, tiles
from elsaa_jax.blocks import kernels as block_kernels
from elsaa_jax.blocks.stretches import Stretches
from elsaa_jax.checks import check_choice, check_int
from elsaa_jax.config import MAX_HARD_BITS
from elsaa_jax.hashing import gray_rank, hard_codes
from elsaa_jax.sparse.plans import BlockRule, causal_plan, full_plan
from elsaa_jax.types import Array, BranchOutput, Implementation, Pairing, TilePlan
from pallas_kernels.configs import block_refusal


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
    branch, _ = sort_lsh_branch(
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
    return branch


class Sparsity(NamedTuple):
    """The static part of a call."""

    rule: BlockRule
    base: int  # up to this many keys, and within stretches of it where causal, attention is exact
    is_causal: bool
    scale: float
    count_keys: bool
    route: dispatch.Route


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
    count_keys: bool = False,
) -> tuple[BranchOutput, Array | None]:
    """`sort_lsh_attention`, and with `count_keys` how many keys each query saw, (B, T, N) float32."""
    checks.check_qkv(query, key, value, is_causal)
    checks.check_mask("query_mask", query_mask, query.shape[0], query.shape[1])
    checks.check_mask("key_mask", key_mask, key.shape[0], key.shape[1])
    _check_planes(planes, key)
    check_int("block_size", block_size, 1)
    check_int("min_length", min_length, 0)
    check_int("num_neighbors", num_neighbors, 0)
    check_choice("pairing", pairing, (None, "rank", "bucket"))
    route = dispatch.route(implementation, block_refusal(query, key))
    sparsity = Sparsity(
        make_rule(key.shape[1], block_size, num_neighbors, pairing, is_causal, query_mask is key_mask),
        base_length(block_size, min_length, is_causal),
        is_causal,
        checks.resolve_scale(scale, query.shape[-1]),
        count_keys,
        route,
    )
    return _branch(sparsity, query, key, value, planes, query_mask, key_mask)


def make_rule(
    num_keys: int, block_size: int, num_neighbors: int, pairing: Pairing | None, is_causal: bool, same_mask: bool
) -> BlockRule:
    """The rule of a call: one block holds all keys at most, and no block has more neighbours than there are."""
    block_size = min(block_size, num_keys)
    num_neighbors = min(num_neighbors, -(-num_keys // block_size) - 1)
    return BlockRule(block_size, num_neighbors, pairing or ("bucket" if is_causal else "rank"), same_mask)


def base_length(block_size: int, min_length: int, is_causal: bool) -> int:
    """Up to how many keys attention is exact, and within stretches of how many where it is causal."""
    return (min_length or block_size) if is_causal else min_length


@functools.partial(jax.jit, static_argnums=0)
def _branch(
    sparsity: Sparsity,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    query_mask: Array | None,
    key_mask: Array | None,
) -> tuple[BranchOutput, Array | None]:
    is_causal, base, num_queries, num_keys = sparsity.is_causal, sparsity.base, query.shape[1], key.shape[1]
    query = checks.finite_masked_queries(query_mask, query)
    key, value = checks.zero_masked_keys(key_mask, key, value)
    count = None
    if num_keys <= base:
        out, log_mass = exact.exact_attention(
            query,
            key,
            value,
            is_causal=is_causal,
            key_mask=key_mask,
            scale=sparsity.scale,
            implementation=sparsity.route.implementation,
        )
        if sparsity.count_keys:
            count = exact.count_keys(query, num_keys, is_causal, key_mask)
    else:
        plan_of = functools.partial(causal_plan, base=base) if is_causal else full_plan
        plan = plan_of(*gray_ranks(query, key, planes), query_mask, key_mask, sparsity.rule)
        stretches = Stretches(base, num_queries, num_keys) if is_causal else None
        masks = query_mask, key_mask
        out, log_mass = _attend((sparsity.scale, stretches, sparsity.route), query, key, value, plan, masks)
        if sparsity.count_keys:
            count = tiles.count_keys(plan, query.size // query.shape[-1], key.size // key.shape[-1])
            count = count.reshape(query.shape[:3])
            if stretches is not None:
                count = count + stretches.count_keys(query, key_mask)
    if query_mask is not None:
        keep = query_mask[:, :, None]
        out, log_mass = jnp.where(keep[..., None], out, 0), jnp.where(keep, log_mass, -jnp.inf)
    return BranchOutput(out, log_mass), count


def _check_planes(planes: Array, key: Array) -> None:
    num_kv_heads, head_dim = key.shape[2:]
    shape = jnp.shape(planes)
    if len(shape) not in (2, 3) or shape[-1] != head_dim or (len(shape) == 3 and shape[0] != num_kv_heads):
        raise ValueError(
            f"planes has shape {shape}; it must be (bits, {head_dim}), or ({num_kv_heads}, bits, {head_dim}) "
            "with one set for each key/value head"
        )
    check_int("the number of bits of the planes", shape[-2], 1, MAX_HARD_BITS)


def gray_ranks(query: Array, key: Array, planes: Array) -> tuple[Array, Array, int]:
    """Gray ranks of the codes, (B, N, T) and (B, K, S), and P; computed once, never differentiated."""
    num_bits = planes.shape[-2]

    def ranks(x: Array, planes: Array) -> Array:
        return gray_rank(hard_codes(*lax.stop_gradient((x, planes))), num_bits).swapaxes(1, 2)

    group = query.shape[2] // key.shape[2]
    query_planes = planes if planes.ndim == 2 else jnp.repeat(planes, group, axis=0)
    return ranks(query, query_planes), ranks(key, planes), num_bits


Static: TypeAlias = tuple[float, Stretches | None, dispatch.Route]
Masks: TypeAlias = tuple[Array | None, Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: Static, query: Array, key: Array, value: Array, plan: TilePlan, masks: Masks
) -> tuple[Array, Array]:
    """out (B, T, N, H), in the query's dtype, and log_mass (B, T, N), over all that the plan and the stretches name."""
    route = static[2]

    def kernels(query, key, value, plan, masks):
        return block_kernels.forward(_layout(static), query, key, value, plan, *masks)

    xla = functools.partial(_attend_xla, static)
    return dispatch.choose(route, kernels, xla, query, key, value, plan, masks)


def _attend_fwd(static, query, key, value, plan, masks):
    out, log_mass = _attend(static, query, key, value, plan, masks)
    return (out, log_mass), (query, key, value, plan, masks, out, log_mass)


def _attend_bwd(static, residuals, cotangents):
    query, key, value, plan, masks, out, log_mass = residuals
    d_out, d_log_mass = cotangents
    shift = exact.row_shift(out, log_mass, d_out, d_log_mass)

    def kernels(query, key, value, plan, masks, *rows):
        return block_kernels.backward(_layout(static), query, key, value, plan, *masks, *rows)

    xla = functools.partial(_derive_xla, static)
    arrays = query, key, value, plan, masks, log_mass, d_out, shift
    return *dispatch.choose(static[2], kernels, xla, *arrays), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _layout(static: Static) -> block_kernels.Layout:
    scale, stretches, route = static
    base = None if stretches is None else stretches.base
    stretch = base, stretches is not None
    return block_kernels.Layout(scale, *stretch, route.target, route.arithmetic, route.launcher)


def _attend_xla(static, query, key, value, plan, masks):
    scale, stretches, _ = static
    start = None
    if stretches is not None:
        out, log_mass = stretches.forward(scale, query, key, value, masks[1])
        start = flatten(out), flatten(log_mass)
    plan = tiles.interleave(plan, key.shape[0] * key.shape[2])
    out, log_mass = tiles.forward(plan, scale, flatten(query), flatten(key), flatten(value), start)
    return out.reshape(query.shape).astype(query.dtype), log_mass.reshape(query.shape[:3])


def _derive_xla(static, query, key, value, plan, masks, log_mass, d_out, shift):
    scale, stretches, _ = static
    if stretches is None:
        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    else:
        start = stretches.backward(scale, query, key, value, masks[1], log_mass, d_out, shift)
    rows = flatten(query), flatten(key), flatten(value), flatten(log_mass), flatten(d_out), flatten(shift)
    plan = tiles.interleave(plan, key.shape[0] * key.shape[2])
    derivatives = tiles.backward(plan, scale, *rows, (flatten(start[0]), flatten(start[1]), flatten(start[2])))
    return tuple(d.reshape(x.shape).astype(x.dtype) for d, x in zip(derivatives, (query, key, value), strict=True))
