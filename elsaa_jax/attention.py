"""ELSAA attention: both branches and their fusion in one call (Alg. 1 and 6 of the paper)."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from elsaa_jax import checks
from elsaa_jax.blocks.exact import count_keys
from elsaa_jax.checks import check_instance
from elsaa_jax.config import ElsaaConfig, check_shared_bits
from elsaa_jax.fusion import broadcast_rows, fuse
from elsaa_jax.low_rank.fused_race import can_fuse, fused_race
from elsaa_jax.low_rank.race import make_race, race_attention
from elsaa_jax.sparse.crossover import is_short, resolve_min_length
from elsaa_jax.sparse.sort_lsh import sort_lsh_branch
from elsaa_jax.types import Array, BranchOutput, FusionKind, Implementation


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
    check_instance("config", config, ElsaaConfig)
    branches = Branches(
        query,
        key,
        value,
        race_planes,
        lsh_planes,
        config,
        beta,
        is_causal,
        query_mask,
        key_mask,
        scale,
        implementation,
    )
    sparse, gates = branches.sparse(), (gate_sparse, gate_low_rank)
    if not return_branches:
        return sparse.out if branches.is_exact else branches.fuse(sparse, gates, lam, config.fusion.kind)[0]
    low_rank = branches.low_rank()
    out = sparse.out if branches.is_exact else branches.fuse_with(sparse, low_rank, gates, lam, config.fusion.kind)
    return out, (sparse, low_rank)


Gates: TypeAlias = tuple[float | Array, float | Array]


class Branches(NamedTuple):
    """The two branches of one call; arguments as of `elsaa_attention`. Masses are scaled as the config says."""

    query: Array
    key: Array
    value: Array
    race_planes: Array
    lsh_planes: Array | None
    config: ElsaaConfig
    beta: float | Array | None
    is_causal: bool
    query_mask: Array | None
    key_mask: Array | None
    scale: float | None
    implementation: Implementation | None

    @property
    def is_exact(self) -> bool:
        """Whether the sparse branch, which is exact then, is all of the attention."""
        return is_short(self.config.sparse, self.key.shape[1], self.is_causal)

    def sparse(self) -> BranchOutput:
        """The sparse branch."""
        checks.check_qkv(self.query, self.key, self.value, self.is_causal)
        checks.check_mask("query_mask", self.query_mask, self.query.shape[0], self.query.shape[1])
        config = self.config.sparse
        sparse, num_keys = sort_lsh_branch(
            self.query,
            self.key,
            self.value,
            resolve_lsh_planes(self.race_planes, self.lsh_planes, self.config),
            block_size=config.block_size,
            min_length=resolve_min_length(config, self.key.shape[1], self.is_causal),
            num_neighbors=config.num_neighbors,
            pairing=config.pairing,
            is_causal=self.is_causal,
            query_mask=self.query_mask,
            key_mask=self.key_mask,
            scale=self.scale,
            implementation=self.implementation,
            count_keys=self.config.fusion.mass_scale == "mean",
        )
        return sparse if num_keys is None else _mean_mass(sparse, num_keys)

    def low_rank(self) -> BranchOutput:
        """The low-rank branch."""
        config = self.config.race
        low_rank = race_attention(
            checks.finite_masked_queries(self.query_mask, self.query),
            self.key,
            self.value,
            self.race_planes,
            beta=self._beta(),
            num_ensembles=config.num_ensembles,
            is_causal=self.is_causal,
            key_mask=self.key_mask,
            chunk_size=config.chunk_size,
            eps=self.config.fusion.eps,
            implementation=self.implementation,
        )
        num_keys = self._num_keys()
        return low_rank if num_keys is None else _mean_mass(low_rank, num_keys)

    def fuse(self, sparse: BranchOutput, gates: Gates, lam: float | Array, kind: FusionKind) -> tuple[Array, Array]:
        """The fused output and the low-rank log-mass; by one kernel where that saves memory traffic."""
        config = self.config
        static = make_race(
            self.query,
            self.key,
            self.race_planes,
            config.race.num_ensembles,
            self.is_causal,
            config.race.chunk_size,
            self.implementation,
        )
        if not can_fuse(static, kind, config.fusion.stop_gradient_mass):
            low_rank = self.low_rank()
            return self.fuse_with(sparse, low_rank, gates, lam, kind), low_rank.log_mass
        checks.check_scalar("beta", self._beta(), positive=True)
        shape = sparse.log_mass.shape
        gate_sparse, gate_low_rank = (
            broadcast_rows(f"gate_{name}", gate, shape)
            for name, gate in zip(("sparse", "low_rank"), gates, strict=True)
        )
        return fused_race(
            static,
            checks.finite_masked_queries(self.query_mask, self.query),
            self.key,
            self.value,
            self.race_planes,
            sparse,
            gates=(gate_sparse, gate_low_rank),
            lam=broadcast_rows("lam", lam, shape),
            num_keys=self._num_keys(),
            beta=self._beta(),
            eps=config.fusion.eps,
            key_mask=self.key_mask,
            kind=kind,
            stop_gradient_mass=config.fusion.stop_gradient_mass,
        )

    def fuse_with(
        self, sparse: BranchOutput, low_rank: BranchOutput, gates: Gates, lam: float | Array, kind: FusionKind
    ) -> Array:
        """The fused output of branches that are there."""
        return fuse(
            sparse,
            low_rank,
            gate_sparse=gates[0],
            gate_low_rank=gates[1],
            lam=lam,
            eps=self.config.fusion.eps,
            kind=kind,
            stop_gradient_mass=self.config.fusion.stop_gradient_mass,
        )

    def _beta(self) -> float | Array:
        return self.config.race.beta if self.beta is None else self.beta

    def _num_keys(self) -> Array | None:
        """What the low-rank mass is divided by, (B, T, N) float32."""
        if self.config.fusion.mass_scale != "mean":
            return None
        return count_keys(self.query, self.key.shape[1], self.is_causal, self.key_mask)


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
