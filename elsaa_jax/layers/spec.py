"""The attentions of the paper's tables by name, as one call over the library's functions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from elsaa_jax import dispatch
from elsaa_jax.attention import Branches
from elsaa_jax.blocks.exact import exact_attention
from elsaa_jax.checks import check_bool, check_choice, check_instance, check_int
from elsaa_jax.config import ElsaaConfig
from elsaa_jax.fusion import sparse_multiplier
from elsaa_jax.hashing import sample_planes
from elsaa_jax.low_rank.performer import performer_attention, sample_projection
from elsaa_jax.low_rank.race import race_attention
from elsaa_jax.sparse.crossover import resolve_min_length
from elsaa_jax.sparse.sort_lsh import sort_lsh_attention
from elsaa_jax.types import Array, AttentionKind, BranchOutput, FusionKind, Implementation

ATTENTION_KINDS: tuple[AttentionKind, ...] = ("elsaa", "race", "sort_lsh", "sort_lsh_race", "exact", "performer")
HASH_NAMES = ("race_planes", "lsh_planes", "projection")


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One attention of the paper's tables, by name, at given sizes.

    Attributes:
      kind: "elsaa", "race", "sort_lsh", "sort_lsh_race" (m = 1), "exact" or "performer".
      config: sizes of the branches, and the fusion.
      num_heads: N.
      num_kv_heads: K.
      head_dim: H.
      is_causal: whether queries see the past alone.
      implementation: see `elsaa_jax.dispatch`.
    """

    kind: AttentionKind
    config: ElsaaConfig
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool
    implementation: Implementation | None

    def __post_init__(self) -> None:
        check_choice("attention", self.kind, ATTENTION_KINDS)
        check_instance("config", self.config, ElsaaConfig)
        check_int("num_heads", self.num_heads, 1)
        check_int("num_kv_heads", self.num_kv_heads, 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads = {self.num_heads}")
        if self.config.rotary_base and self.head_dim % 2:
            raise ValueError(f"the head dimension is {self.head_dim}; with ElsaaConfig.rotary_base it must be even")
        check_bool("is_causal", self.is_causal)
        check_choice("implementation", self.implementation, (None, *dispatch.IMPLEMENTATIONS))

    @property
    def has_race(self) -> bool:
        """Whether the low-rank branch runs."""
        return self.kind in ("elsaa", "race", "sort_lsh_race")

    @property
    def has_gate(self) -> bool:
        """Whether two branches are fused."""
        return self.kind in ("elsaa", "sort_lsh_race")

    @property
    def fusion_kind(self) -> FusionKind:
        """How they are fused; "sort_lsh_race" is the ablation m = 1."""
        return "sum" if self.kind == "sort_lsh_race" else self.config.fusion.kind

    @property
    def lambda_kind(self) -> str | None:
        """How lambda comes about; None where the fusion has none."""
        return self.config.fusion.lambda_kind if self.has_gate and self.fusion_kind != "sum" else None

    @property
    def learns_beta(self) -> bool:
        """Whether beta is a parameter."""
        return self.has_race and self.config.race.learn_beta

    @property
    def branch_dropout_rate(self) -> float:
        """Share of training examples without the sparse branch."""
        return self.config.fusion.branch_dropout_rate if self.has_gate else 0.0

    def sample_hashes(self, rng: Array) -> dict[str, Array]:
        """The fixed random planes of the layer by name, one set for each key/value head."""
        race_rng, lsh_rng, projection_rng = jax.random.split(rng, 3)
        config, heads, dim = self.config, self.num_kv_heads, self.head_dim
        hashes = {}
        if self.has_race:
            hashes["race_planes"] = sample_planes(
                race_rng, (heads, config.race.total_tables, config.race.num_bits, dim)
            )
        if self.kind == "sort_lsh" or (self.has_gate and not config.shares_planes):
            hashes["lsh_planes"] = sample_planes(lsh_rng, (heads, config.sparse.num_bits, dim))
        if self.kind == "performer":
            rngs = jax.random.split(projection_rng, heads)
            sample = lambda rng: sample_projection(rng, config.performer_features, dim)  # noqa: E731
            hashes["projection"] = jax.vmap(sample)(rngs)
        return hashes

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        hashes: dict[str, Array],
        *,
        beta: float | Array | None = None,
        lam: float | Array = 1.0,
        gates: tuple[float | Array, float | Array] = (1.0, 1.0),
        query_mask: Array | None = None,
        key_mask: Array | None = None,
        branch_rng: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """The attention, and what may be sown: gates, lambda, multiplier and masses, all (B, T, N).

        Args:
          query: (B, T, N, H).
          key: (B, S, K, H).
          value: (B, S, K, H).
          hashes: as of `sample_hashes`.
          beta: sharpness of the soft codes; None: the config's.
          lam: lambda, broadcast to (B, T, N).
          gates: of the sparse and of the low-rank branch, broadcast to (B, T, N).
          query_mask: (B, T).
          key_mask: (B, S).
          branch_rng: for branch dropout; None: no example is without its sparse branch.
        """
        if self.has_gate:
            return self._fused(query, key, value, hashes, beta, lam, gates, query_mask, key_mask, branch_rng)
        config = self.config
        if self.kind == "race":
            branch = race_attention(
                query,
                key,
                value,
                hashes["race_planes"],
                beta=config.race.beta if beta is None else beta,
                num_ensembles=config.race.num_ensembles,
                chunk_size=config.race.chunk_size,
                eps=config.fusion.eps,
                implementation=self.implementation,
                is_causal=self.is_causal,
                key_mask=key_mask,
            )
        elif self.kind == "sort_lsh":
            branch = sort_lsh_attention(
                query,
                key,
                value,
                hashes["lsh_planes"],
                block_size=config.sparse.block_size,
                min_length=resolve_min_length(config.sparse, key.shape[1], self.is_causal),
                num_neighbors=config.sparse.num_neighbors,
                pairing=config.sparse.pairing,
                query_mask=query_mask,
                implementation=self.implementation,
                is_causal=self.is_causal,
                key_mask=key_mask,
            )
        elif self.kind == "exact":
            branch = exact_attention(
                query, key, value, is_causal=self.is_causal, key_mask=key_mask, implementation=self.implementation
            )
        else:
            dispatch.check("performer_attention", self.implementation)
            branch = performer_attention(
                query,
                key,
                value,
                hashes["projection"],
                is_causal=self.is_causal,
                key_mask=key_mask,
                eps=config.fusion.eps,
            )
        return branch.out, {"log_mass": branch.log_mass}

    def _fused(self, query, key, value, hashes, beta, lam, gates, query_mask, key_mask, branch_rng):
        fusion = self.config.fusion
        branches = Branches(
            query,
            key,
            value,
            hashes["race_planes"],
            hashes.get("lsh_planes"),
            self.config,
            beta,
            self.is_causal,
            query_mask,
            key_mask,
            None,
            self.implementation,
        )
        sparse = branches.sparse()
        if branches.is_exact:
            return sparse.out, {"log_mass": sparse.log_mass}
        if branch_rng is not None:
            keep = kept_examples(branch_rng, self.branch_dropout_rate, query.shape[0])[:, None, None]
            sparse = BranchOutput(jnp.where(keep[..., None], sparse.out, 0), jnp.where(keep, sparse.log_mass, -jnp.inf))
        out, low_rank_log_mass = branches.fuse(sparse, gates, lam, self.fusion_kind)
        shape = sparse.log_mass.shape
        weights = {
            "gate_sparse": jnp.broadcast_to(jnp.asarray(gates[0], jnp.float32), shape),
            "gate_low_rank": jnp.broadcast_to(jnp.asarray(gates[1], jnp.float32), shape),
            "sparse_log_mass": sparse.log_mass,
            "low_rank_log_mass": low_rank_log_mass,
        }
        if self.lambda_kind is None:
            return out, weights
        weights["lam"] = jnp.broadcast_to(jnp.asarray(lam, jnp.float32), shape)
        if self.fusion_kind != "lse":
            weights["multiplier"] = sparse_multiplier(sparse.log_mass, low_rank_log_mass, lam=lam, eps=fusion.eps)
        return out, weights


def kept_examples(rng: Array, rate: float, batch: int) -> Array:
    """(B,) bool with a share `rate` of False at random places: B * rate of them, rounded at random."""
    place_rng, round_rng = jax.random.split(rng)
    dropped = jnp.floor(batch * rate + jax.random.uniform(round_rng)).astype(jnp.int32)
    return jax.random.permutation(place_rng, batch) >= dropped
