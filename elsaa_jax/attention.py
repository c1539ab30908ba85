"""ELSAA attention: both branches and their fusion in one call (Alg. 1 and 6 of the paper)."""

from __future__ import annotations

import jax.numpy as jnp

from elsaa_jax import checks
from elsaa_jax.config import ElsaaConfig, check_instance, check_shared_bits
from elsaa_jax.exact import count_keys
from elsaa_jax.fusion import fuse
from elsaa_jax.race import race_attention
from elsaa_jax.sort_lsh import sort_lsh_branch
from elsaa_jax.types import Array, BranchOutput, Implementation


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
    """Sparse plus low-rank attention, fused by the masses of the two branches.

    Args:
      query: (B, T, N, H).
      key: (B, S, K, H).
      value: (B, S, K, H).
      race_planes: (M*L, P, H), or (K, M*L, P, H) with one set for each key/value head.
      lsh_planes: (bits, H) or (K, bits, H). None: the first `config.sparse.num_bits` of the race
        planes, taken table after table (shared planes).
      config: the branches and the fusion. What concerns a layer alone has no part here: lambda's
        kind and start, gates, branch dropout, `share_planes`, the number of planes, `short_conv`, `rotary_base`.
      lam: lambda of the multiplier, broadcast to (B, T, N).
      gate_sparse: gate of the sparse branch, broadcast to (B, T, N).
      gate_low_rank: gate of the low-rank branch, broadcast to (B, T, N).
      beta: sharpness of the soft codes, may be traced; None: `config.race.beta`.
      is_causal: query i is the (S - T + i)-th position and attends to positions up to its own.
      query_mask: (B, T) bool; a masked query has no keys in the sparse branch and moves no other.
      key_mask: (B, S) bool, True = attend.
      scale: factor of the logits of the sparse branch; H**-0.5 where None.
      implementation: see `elsaa_jax.dispatch`.
      return_branches: whether to return the branches too, their masses as the fusion sees them.

    Returns:
      out (B, T, N, H), or (out, (sparse, low_rank)).
    """
    branches = elsaa_branches(
        query,
        key,
        value,
        race_planes=race_planes,
        lsh_planes=lsh_planes,
        config=config,
        beta=beta,
        is_causal=is_causal,
        query_mask=query_mask,
        key_mask=key_mask,
        scale=scale,
        implementation=implementation,
    )
    fusion = config.fusion
    out = fuse(
        *branches,
        gate_sparse=gate_sparse,
        gate_low_rank=gate_low_rank,
        lam=lam,
        eps=fusion.eps,
        kind=fusion.kind,
        stop_gradient_mass=fusion.stop_gradient_mass,
    )
    return (out, branches) if return_branches else out


def elsaa_branches(
    query: Array,
    key: Array,
    value: Array,
    *,
    race_planes: Array,
    lsh_planes: Array | None,
    config: ElsaaConfig,
    beta: float | Array | None,
    is_causal: bool,
    query_mask: Array | None,
    key_mask: Array | None,
    scale: float | None,
    implementation: Implementation | None,
) -> tuple[BranchOutput, BranchOutput]:
    """The sparse and the low-rank branch, their masses scaled as `config.fusion.mass_scale` says."""
    check_instance("config", config, ElsaaConfig)
    checks.check_qkv(query, key, value, is_causal)
    checks.check_mask("query_mask", query_mask, query.shape[0], query.shape[1])
    low_rank = race_attention(
        checks.finite_masked_queries(query_mask, query),
        key,
        value,
        race_planes,
        beta=config.race.beta if beta is None else beta,
        num_ensembles=config.race.num_ensembles,
        is_causal=is_causal,
        key_mask=key_mask,
        chunk_size=config.race.chunk_size,
        eps=config.fusion.eps,
        implementation=implementation,
    )
    sparse, num_keys = sort_lsh_branch(
        query,
        key,
        value,
        resolve_lsh_planes(race_planes, lsh_planes, config),
        block_size=config.sparse.block_size,
        min_length=config.sparse.min_length,
        num_neighbors=config.sparse.num_neighbors,
        pairing=config.sparse.pairing,
        is_causal=is_causal,
        query_mask=query_mask,
        key_mask=key_mask,
        scale=scale,
        implementation=implementation,
        count_keys=config.fusion.mass_scale == "mean",
    )
    if num_keys is not None:
        sparse = _mean_mass(sparse, num_keys)
        low_rank = _mean_mass(low_rank, count_keys(query, key.shape[1], is_causal, key_mask))
    return sparse, low_rank


def resolve_lsh_planes(race_planes: Array, lsh_planes: Array | None, config: ElsaaConfig) -> Array:
    """The planes of the sparse branch: its own, or the first ones of the low-rank branch."""
    if lsh_planes is not None:
        return lsh_planes
    num_bits = config.sparse.num_bits
    *heads, tables, bits, head_dim = race_planes.shape
    check_shared_bits(num_bits, tables * bits)
    return race_planes.reshape(*heads, tables * bits, head_dim)[..., :num_bits, :]


def _mean_mass(branch: BranchOutput, count: Array) -> BranchOutput:
    return BranchOutput(branch.out, branch.log_mass - jnp.log(jnp.maximum(count, 1.0)))
