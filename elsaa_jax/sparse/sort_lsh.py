"""The sparse branch: hash, sort, and attend exactly within blocks (Alg. 4 and 5 of the paper)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax import dispatch
from elsaa_jax.arrays.guards import guard_inputs
from elsaa_jax.blocks import tiles
from elsaa_jax.blocks.attend import attend
from elsaa_jax.blocks.call import BlockCall
from elsaa_jax.blocks.stretches import Stretches
from elsaa_jax.checks import check_call, check_choice, check_int, check_planes
from elsaa_jax.config import MAX_HARD_BITS, SortLshConfig
from elsaa_jax.hashing import gray_rank, hard_codes
from elsaa_jax.sparse.call import SparseCall
from elsaa_jax.sparse.crossover import resolve_min_length
from elsaa_jax.sparse.full import full_plan
from elsaa_jax.sparse.levels import causal_plan
from elsaa_jax.sparse.orders import sort_both
from elsaa_jax.types import Array, BranchOutput, CallFacts, Implementation, Pairing, TilePlan
from pallas_kernels.configs import block_refusal

# Longest sequence whose pairing is exact in 32-bit integers; see `pairing.floor_ratio`.
MAX_LENGTH = 2**24


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
    """Attends exactly from each query to one block of keys with similar hash codes.

    Non-causal: queries and keys are sorted by the Gray rank of their codes and paired block by block. Causal:
    attention is exact within stretches of N0 tokens. At half-lengths m = N0, 2 N0, 4 N0, ... the second half of each
    window of 2m tokens attends to blocks of its first half, which lies wholly in its past. All parts are merged by
    their log-sum-exp. N0 is `min_length`, or `block_size` if that is 0.

    Args:
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      planes: Hash planes, (P, H), or (K, P, H) with one set for each key/value head.
      block_size: Keys of a block. The last block may be short.
      min_length: Attention is exact up to this many keys.
      num_neighbors: Further blocks that a query attends to, on each side of its own.
      pairing: Rule by which a query finds its block. "rank" (the paper's): the query of rank r of n_q meets the key of
        rank floor(r n_k / n_q); in the causal form a later query can then move an earlier one to another block, so
        information leaks. "bucket": each query takes the block in which its own code lies among the keys, spread over
        its bucket by its position; strictly causal. Default: "bucket" if causal, else "rank".
      is_causal: Whether query i, at position S - T + i, attends to positions up to its own only.
      query_mask: Queries that take part, (B, T) bool. A masked query has no keys and moves no other.
      key_mask: Keys that take part, (B, S) bool, True = attend.
      scale: Factor of the logits; H**-0.5 by default.
      implementation: "xla", "pallas" or "interpret"; by default the best for each platform (`elsaa_jax.dispatch`).

    Returns:
      The output (B, T, N, H) and the log-mass (B, T, N), the log-sum-exp of the logits that were computed.

    Example:
      >>> import jax
      >>> from elsaa_jax import sample_planes, sort_lsh_attention
      >>> x = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))
      >>> planes = sample_planes(jax.random.key(1), (5, 16))
      >>> out, log_mass = sort_lsh_attention(x, x, x, planes, block_size=16)
      >>> out.shape, log_mass.shape
      ((1, 64, 2, 16), (1, 64, 2))
    """
    facts = check_call(query, key, value, is_causal=is_causal, query_mask=query_mask, key_mask=key_mask, scale=scale)
    check_planes("planes", planes, ("bits",), facts, MAX_HARD_BITS)
    check_int("block_size", block_size, 1)
    check_int("min_length", min_length, 0)
    check_int("num_neighbors", num_neighbors, 0)
    check_choice("pairing", pairing, (None, "rank", "bucket"))
    config = SortLshConfig(planes.shape[-2], block_size, min_length, num_neighbors, pairing)
    call = make_sparse(facts, config, query_mask is key_mask, dispatch.route(implementation, block_refusal(query, key)))
    return _sort_lsh(call, query, key, value, planes, query_mask, key_mask)


def make_sparse(
    facts: CallFacts, config: SortLshConfig, same_mask: bool, route: dispatch.Route, count_keys: bool = False
) -> SparseCall:
    """Resolves the settings of a config for one call.

    A block holds at most all keys, and no block has more neighbours than there are.
    """
    num_keys, is_causal = facts.num_keys, facts.is_causal
    if max(num_keys, facts.num_queries) > MAX_LENGTH:
        raise ValueError(f"key has length {num_keys}; the sparse branch takes at most {MAX_LENGTH} tokens: split them")
    block_size = min(config.block_size, num_keys)
    num_neighbors = min(config.num_neighbors, -(-num_keys // block_size) - 1)
    pairing = config.pairing or ("bucket" if is_causal else "rank")
    base = config.min_length
    if base == "auto":
        base = resolve_min_length(num_keys, is_causal)
    if is_causal:
        base = base or config.block_size
    return SparseCall(facts, block_size, num_neighbors, pairing, base, same_mask, count_keys, route)


@functools.partial(jax.jit, static_argnums=0)
def _sort_lsh(
    call: SparseCall,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    query_mask: Array | None,
    key_mask: Array | None,
) -> BranchOutput:
    query, key, value = guard_inputs(query, key, value, query_mask, key_mask)
    return sparse_branch(call, query, key, value, planes, query_mask, key_mask)[0]


def sparse_branch(
    call: SparseCall,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    query_mask: Array | None,
    key_mask: Array | None,
) -> tuple[BranchOutput, Array | None]:
    """Computes the sparse branch of checked arrays in which masked tokens are 0.

    Args:
      call: Static facts.
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      planes: Hash planes, (P, H) or (K, P, H).
      query_mask: Queries that take part, (B, T) bool, or None.
      key_mask: Keys that take part, (B, S) bool, or None.

    Returns:
      The branch and, if `call.count_keys` is set, the number of keys that each query attended to, (B, T, N) float32.
    """
    num_queries, num_keys, is_causal = call.facts.num_queries, call.facts.num_keys, call.facts.is_causal
    plan = stretches = None
    if num_keys <= call.base:
        stretches = Stretches(num_keys, num_queries, num_keys, is_causal)
    else:
        plan = make_plan(call, query, key, planes, query_mask, key_mask)
        if is_causal:
            stretches = Stretches(call.base, num_queries, num_keys, is_causal)
    block_call = BlockCall(call.facts.scale, stretches, call.route)
    out, log_mass = attend(block_call, query, key, value, plan, query_mask, key_mask)
    count = None
    if call.count_keys:
        count = jnp.zeros(query.shape[:3], jnp.float32)
        if plan is not None:
            num_rows = query.size // query.shape[-1], key.size // key.shape[-1]
            count = tiles.count_keys(plan, *num_rows).reshape(count.shape)
        if stretches is not None:
            count = count + stretches.count_keys(query, key_mask)
    if query_mask is not None:
        keep = query_mask[:, :, None]
        out, log_mass = jnp.where(keep[..., None], out, 0), jnp.where(keep, log_mass, -jnp.inf)
    return BranchOutput(out, log_mass), count


def make_plan(
    call: SparseCall, query: Array, key: Array, planes: Array, query_mask: Array | None, key_mask: Array | None
) -> TilePlan:
    """Hashes, sorts and pairs queries and keys. The arguments are those of `sparse_branch`; there is no gradient."""
    query, key, planes = lax.stop_gradient((query, key, planes))
    num_bits, group = planes.shape[-2], query.shape[2] // key.shape[2]
    query_planes = planes if planes.ndim == 2 else jnp.repeat(planes, group, axis=0)
    query_ranks = gray_rank(hard_codes(query, query_planes), num_bits).swapaxes(1, 2)
    key_ranks = gray_rank(hard_codes(key, planes), num_bits).swapaxes(1, 2)
    tokens = sort_both(call, query_ranks, key_ranks, num_bits, query_mask, key_mask)
    return (causal_plan if call.facts.is_causal else full_plan)(call, tokens, query_mask, key_mask)
