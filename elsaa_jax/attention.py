"""Both branches and their fusion in one call (Alg. 1 and 6 of the paper)."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from elsaa_jax import dispatch
from elsaa_jax.arrays.guards import guard_inputs
from elsaa_jax.blocks.stretches import Stretches
from elsaa_jax.checks import (
    check_call,
    check_instance,
    check_planes,
    check_race_planes,
    check_scalar,
    check_shared_bits,
    check_weights,
)
from elsaa_jax.config import MAX_HARD_BITS, MAX_SOFT_BITS, ElsaaConfig
from elsaa_jax.fusion import fuse_checked
from elsaa_jax.low_rank.race import fused_race, make_arrays, make_race, race_branch, with_fusion
from elsaa_jax.sparse.crossover import resolve_min_length
from elsaa_jax.sparse.sort_lsh import make_sparse, sparse_branch
from elsaa_jax.types import Array, BranchOutput, CallFacts, FusionKind, Implementation
from pallas_kernels.configs import block_refusal, race_refusal
from pallas_kernels.fusion import Sparse

Gates: TypeAlias = tuple[float | Array, float | Array]


def elsaa_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    race_planes: Array,
    lsh_planes: Array | None = None,
    config: ElsaaConfig = ElsaaConfig(),
    lam: float | Array = 1.0,
    gate_sparse: float | Array = 1.0,
    gate_low_rank: float | Array = 1.0,
    beta: float | Array | None = None,
    is_causal: bool = False,
    query_mask: Array | None = None,
    key_mask: Array | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_branches: bool = False,
) -> Array | tuple[Array, tuple[BranchOutput, BranchOutput]]:
    """Computes sparse plus low-rank attention, fused by the masses of the two branches.

    Args:
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      race_planes: Hash planes of the low-rank branch, (M*L, P, H), or (K, M*L, P, H) with one set for each key/value
        head.
      lsh_planes: Hash planes of the sparse branch, (bits, H) or (K, bits, H). By default the first
        `config.sparse.num_bits` of the race planes, taken table after table (shared planes).
      config: Settings of the branches and of the fusion. Settings of a layer have no effect here: lambda's kind and
        start, gates, branch dropout, `share_planes`, the number of planes, `short_conv` and `rotary_base`.
      lam: Lambda of the multiplier, broadcast to (B, T, N).
      gate_sparse: Gate of the sparse branch, broadcast to (B, T, N).
      gate_low_rank: Gate of the low-rank branch, broadcast to (B, T, N).
      beta: Sharpness of the soft codes, may be traced; `config.race.beta` by default.
      is_causal: Whether query i, at position S - T + i, attends to positions up to its own only.
      query_mask: Queries that take part, (B, T) bool. A masked query has no keys in the sparse branch and moves no
        other.
      key_mask: Keys that take part, (B, S) bool, True = attend.
      scale: Factor of the logits of the sparse branch; H**-0.5 by default.
      implementation: "xla", "pallas" or "interpret"; by default the best for each platform (`elsaa_jax.dispatch`).
      return_branches: Whether to return the branches too, with the masses that the fusion uses.

    Returns:
      The output (B, T, N, H), or (output, (sparse, low_rank)).

    Example:
      >>> import jax
      >>> from elsaa_jax import elsaa_attention, sample_planes
      >>> x = jax.random.normal(jax.random.key(0), (1, 300, 2, 16))
      >>> planes = sample_planes(jax.random.key(1), (4, 4, 16))  # 4 tables of 4 bits
      >>> elsaa_attention(x, x, x, race_planes=planes, is_causal=True).shape
      (1, 300, 2, 16)
    """
    check_instance("config", config, ElsaaConfig)
    arrays, masks = (query, key, value, race_planes, lsh_planes), (query_mask, key_mask)
    call = make_elsaa(*arrays, *masks, config, is_causal, scale, implementation)
    for name, weight in (("gate_sparse", gate_sparse), ("gate_low_rank", gate_low_rank), ("lam", lam)):
        check_weights(name, weight, query.shape[:3])
    beta = config.race.beta if beta is None else beta
    check_scalar("beta", beta, positive=True)
    return _elsaa(call, return_branches, *arrays, beta, *masks, (gate_sparse, gate_low_rank), lam)


class ElsaaCall(NamedTuple):
    """Static facts of one call. Hashable, so it can be a static argument of `jit`.

    Attributes:
      facts: Sizes of the arrays, causality and scale.
      config: Settings of the branches and of the fusion.
      kind: Kind of fusion.
      same_mask: Whether queries and keys have the same mask.
      block_route: Implementation of the sparse branch.
      race_route: Implementation of the low-rank branch.
      is_exact: Whether the sparse branch, which is exact then, is the whole attention.
    """

    facts: CallFacts
    config: ElsaaConfig
    kind: FusionKind
    same_mask: bool
    block_route: dispatch.Route
    race_route: dispatch.Route
    is_exact: bool


def make_elsaa(
    query: Array,
    key: Array,
    value: Array,
    race_planes: Array,
    lsh_planes: Array | None,
    query_mask: Array | None,
    key_mask: Array | None,
    config: ElsaaConfig,
    is_causal: bool,
    scale: float | None,
    implementation: Implementation | None,
    kind: FusionKind | None = None,
) -> ElsaaCall:
    """Checks the arguments of `elsaa_attention` and returns the static facts of the call.

    `kind` overrules the kind of fusion of the config.
    """
    masks = {"query_mask": query_mask, "key_mask": key_mask}
    facts = check_call(query, key, value, is_causal=is_causal, scale=scale, **masks)
    check_race_planes("race_planes", race_planes, facts, config.race.num_ensembles, MAX_SOFT_BITS)
    tables, bits = race_planes.shape[-3:-1]
    if lsh_planes is None:
        check_shared_bits(config.sparse.num_bits, tables * bits)
    else:
        check_planes("lsh_planes", lsh_planes, ("bits",), facts, MAX_HARD_BITS)
    chunk = min(config.race.chunk_size, key.shape[1]) if is_causal else None
    refusals = block_refusal(query, key), race_refusal(query, key, tables // config.race.num_ensembles, bits, chunk)
    routes = dispatch.route(implementation, refusals[0]), dispatch.route(implementation, refusals[1])
    is_exact = False
    if config.sparse.min_length == "auto":
        # The measured length up to which exact attention runs alone may change, so it is resolved outside of `jit`.
        min_length = resolve_min_length(facts.num_keys, is_causal)
        is_exact = min_length == facts.num_keys
        config = dataclasses.replace(config, sparse=dataclasses.replace(config.sparse, min_length=min_length))
    return ElsaaCall(facts, config, kind or config.fusion.kind, query_mask is key_mask, *routes, is_exact)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _elsaa(
    call: ElsaaCall,
    return_branches: bool,
    query: Array,
    key: Array,
    value: Array,
    race_planes: Array,
    lsh_planes: Array | None,
    beta: float | Array,
    query_mask: Array | None,
    key_mask: Array | None,
    gates: Gates,
    lam: float | Array,
) -> Array | tuple[Array, tuple[BranchOutput, BranchOutput]]:
    arrays = query, key, value, race_planes, lsh_planes, beta, query_mask, key_mask
    both = attend_both(call, *arrays, gates, lam, keep_branches=return_branches)
    if not return_branches:
        return both.out
    assert both.low_rank_log_mass is not None
    assert both.low_rank_out is not None
    return both.out, (both.sparse, BranchOutput(both.low_rank_out, both.low_rank_log_mass))


class Fused(NamedTuple):
    """The result of both branches. The masses are those that the fusion uses.

    Attributes:
      out: Fused output, (B, T, N, H).
      sparse: Sparse branch.
      low_rank_log_mass: Log-mass of the low-rank branch, (B, T, N), or None if it did not run.
      low_rank_out: Output of the low-rank branch, or None if the readout fused it or the branch did not run.
    """

    out: Array
    sparse: BranchOutput
    low_rank_log_mass: Array | None
    low_rank_out: Array | None


def attend_both(
    call: ElsaaCall,
    query: Array,
    key: Array,
    value: Array,
    race_planes: Array,
    lsh_planes: Array | None,
    beta: float | Array,
    query_mask: Array | None,
    key_mask: Array | None,
    gates: Gates,
    lam: float | Array,
    keep_sparse: Array | None = None,
    keep_branches: bool = False,
) -> Fused:
    """Computes the fused output and both branches of arguments that were checked.

    Args:
      call: Static facts.
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      race_planes: Hash planes of the low-rank branch.
      lsh_planes: Hash planes of the sparse branch, or None for the first race planes.
      beta: Sharpness of the soft codes.
      query_mask: Queries that take part, (B, T) bool, or None.
      key_mask: Keys that take part, (B, S) bool, or None.
      gates: Gates of the sparse and the low-rank branch, broadcast to (B, T, N).
      lam: Lambda, broadcast to (B, T, N).
      keep_sparse: Examples that have a sparse branch, (B,) bool, or None for all.
      keep_branches: Whether to compute the output of the low-rank branch in any case.

    Returns:
      The output and the branches that were computed.
    """
    facts, config, fusion = call.facts, call.config, call.config.fusion
    if lsh_planes is None:
        planes = race_planes.reshape(*race_planes.shape[:-3], -1, race_planes.shape[-1])
        lsh_planes = planes[..., : config.sparse.num_bits, :]
    query, key, value = guard_inputs(query, key, value, query_mask, key_mask)
    counts = fusion.mass_scale == "mean"
    sparse_call = make_sparse(facts, config.sparse, call.same_mask, call.block_route, count_keys=counts)
    sparse, num_keys = sparse_branch(sparse_call, query, key, value, lsh_planes, query_mask, key_mask)
    if num_keys is not None:
        sparse = BranchOutput(sparse.out, sparse.log_mass - jnp.log(jnp.maximum(num_keys, 1.0)))
    if call.is_exact and not keep_branches:
        return Fused(sparse.out, sparse, None, None)
    if keep_sparse is not None:
        keep = keep_sparse[:, None, None]
        sparse = BranchOutput(jnp.where(keep[..., None], sparse.out, 0), jnp.where(keep, sparse.log_mass, -jnp.inf))
    low_rank_keys = None
    if counts:
        stretch = Stretches(facts.num_keys, facts.num_queries, facts.num_keys, facts.is_causal)
        low_rank_keys = jnp.maximum(stretch.count_keys(query, key_mask), 1.0)
    arrays = make_arrays(query, key, value, race_planes, beta, fusion.eps, key_mask)
    race = make_race(facts, race_planes, config.race.num_ensembles, config.race.chunk_size, call.race_route)
    if not keep_branches:
        race = with_fusion(race, call.kind, fusion.stop_gradient_mass)
    if race.fusion is None:
        low_rank = race_branch(race, arrays)
        if low_rank_keys is not None:
            low_rank = BranchOutput(low_rank.out, low_rank.log_mass - jnp.log(low_rank_keys))
        out, eps, stop_gradient = sparse.out, fusion.eps, fusion.stop_gradient_mass
        if not call.is_exact:
            out = fuse_checked(sparse, low_rank, gates, lam, eps=eps, kind=call.kind, stop_gradient_mass=stop_gradient)
        return Fused(out, sparse, low_rank.log_mass, low_rank.out)
    shape = sparse.log_mass.shape
    gate_sparse = jnp.broadcast_to(jnp.asarray(gates[0], jnp.float32), shape)
    gate_low_rank = jnp.broadcast_to(jnp.asarray(gates[1], jnp.float32), shape)
    factor = jnp.broadcast_to(jnp.asarray(lam, jnp.float32), shape)
    if low_rank_keys is None:
        out, log_mass = fused_race(race, arrays, Sparse(*sparse, factor, gate_sparse, gate_low_rank))
        return Fused(out, sparse, log_mass, None)
    # Lambda is a factor of the sum over keys, so it takes the division by their number.
    out, log_mass = fused_race(race, arrays, Sparse(*sparse, factor / low_rank_keys, gate_sparse, gate_low_rank))
    return Fused(out, sparse, log_mass - jnp.log(low_rank_keys), None)
