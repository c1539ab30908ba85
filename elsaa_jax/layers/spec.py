"""The attentions of the paper's tables by name, as one call over the library's functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from elsaa_jax import dispatch
from elsaa_jax.arrays.weights import multiplier
from elsaa_jax.attention import Gates, attend_both, make_elsaa
from elsaa_jax.blocks.exact import exact_attention
from elsaa_jax.checks import check_bool, check_choice, check_instance, check_int
from elsaa_jax.config import ElsaaConfig
from elsaa_jax.hashing import sample_planes
from elsaa_jax.low_rank.performer import performer_attention, sample_projection
from elsaa_jax.low_rank.race import race_attention
from elsaa_jax.sparse.crossover import resolve_min_length
from elsaa_jax.sparse.sort_lsh import sort_lsh_attention
from elsaa_jax.types import Array, AttentionKind, FusionKind, Implementation, LambdaKind

ATTENTION_KINDS: tuple[AttentionKind, ...] = ("elsaa", "race", "sort_lsh", "sort_lsh_race", "exact", "performer")
HASH_NAMES = ("race_planes", "lsh_planes", "projection")


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One attention of the paper's tables at given sizes. The attributes after `implementation` follow from the others.

    Attributes:
      kind: Name of the attention: "elsaa", "race", "sort_lsh", "sort_lsh_race" (m = 1), "exact" or "performer".
      config: Settings of the branches and of the fusion.
      num_heads: N.
      num_kv_heads: K.
      qkv_features: Width of the queries, N * H.
      is_causal: Whether queries attend to their past only.
      implementation: Implementation that the caller asked for; see `elsaa_jax.dispatch`.
      head_dim: H.
      has_gate: Whether two branches are fused.
      fusion_kind: Kind of fusion; "sort_lsh_race" is the ablation m = 1.
      lambda_kind: Kind of lambda, or None if the fusion has none.
      learns_beta: Whether beta is a parameter.
      branch_dropout_rate: Share of the training examples that run without the sparse branch.
      hash_names: Names of the hash planes that the attention uses.
    """

    kind: AttentionKind
    config: ElsaaConfig
    num_heads: int
    num_kv_heads: int
    qkv_features: int
    is_causal: bool
    implementation: Implementation | None
    head_dim: int = dataclasses.field(init=False)
    has_gate: bool = dataclasses.field(init=False)
    fusion_kind: FusionKind = dataclasses.field(init=False)
    lambda_kind: LambdaKind | None = dataclasses.field(init=False)
    learns_beta: bool = dataclasses.field(init=False)
    branch_dropout_rate: float = dataclasses.field(init=False)
    hash_names: tuple[str, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        check_choice("attention", self.kind, ATTENTION_KINDS)
        check_instance("config", self.config, ElsaaConfig)
        check_int("num_heads", self.num_heads, 1)
        check_int("num_kv_heads", self.num_kv_heads, 1)
        check_int("qkv_features", self.qkv_features, 1)
        check_bool("is_causal", self.is_causal)
        check_choice("implementation", self.implementation, (None, *dispatch.IMPLEMENTATIONS))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads = {self.num_heads}")
        if self.qkv_features % self.num_heads:
            raise ValueError(
                f"qkv_features is {self.qkv_features}; it must be a multiple of num_heads = {self.num_heads}"
            )
        config, fusion, head_dim = self.config, self.config.fusion, self.qkv_features // self.num_heads
        if config.rotary_base and head_dim % 2:
            raise ValueError(f"the head dimension is {head_dim}; with ElsaaConfig.rotary_base it must be even")
        has_gate, has_race = self.kind in ("elsaa", "sort_lsh_race"), self.kind in ("elsaa", "race", "sort_lsh_race")
        fusion_kind = "sum" if self.kind == "sort_lsh_race" else fusion.kind
        hash_names: tuple[str, ...] = ("race_planes",) if has_race else ()
        if self.kind == "sort_lsh" or (has_gate and not config.shares_planes):
            hash_names += ("lsh_planes",)
        if self.kind == "performer":
            hash_names += ("projection",)
        derived = {
            "head_dim": head_dim,
            "has_gate": has_gate,
            "fusion_kind": fusion_kind,
            "lambda_kind": fusion.lambda_kind if has_gate and fusion_kind != "sum" else None,
            "learns_beta": has_race and config.race.learn_beta,
            "branch_dropout_rate": fusion.branch_dropout_rate if has_gate else 0.0,
            "hash_names": hash_names,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def sample_hashes(self, rng: Array) -> dict[str, Array]:
        """Draws the fixed random planes of a layer by name, one set for each key/value head."""
        race_rng, lsh_rng, projection_rng = jax.random.split(rng, 3)
        config, heads, dim = self.config, self.num_kv_heads, self.head_dim
        hashes = {}
        if "race_planes" in self.hash_names:
            shape = heads, config.race.total_tables, config.race.num_bits, dim
            hashes["race_planes"] = sample_planes(race_rng, shape)
        if "lsh_planes" in self.hash_names:
            hashes["lsh_planes"] = sample_planes(lsh_rng, (heads, config.sparse.num_bits, dim))
        if "projection" in self.hash_names:
            rngs = jax.random.split(projection_rng, heads)
            sample = lambda rng: sample_projection(rng, config.performer_features, dim)  # noqa: E731
            hashes["projection"] = jax.vmap(sample)(rngs)
        return hashes

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        hashes: Mapping[str, Array],
        *,
        beta: float | Array | None = None,
        lam: float | Array = 1.0,
        gates: Gates = (1.0, 1.0),
        query_mask: Array | None = None,
        key_mask: Array | None = None,
        branch_rng: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Computes the attention. The values of gates and lambda are not checked: a layer computes them.

        Args:
          query: Queries, (B, T, N, H).
          key: Keys, (B, S, K, H).
          value: Values, (B, S, K, H).
          hashes: Hash planes by name, as `sample_hashes` returns them.
          beta: Sharpness of the soft codes; that of the config by default.
          lam: Lambda, broadcast to (B, T, N).
          gates: Gates of the sparse and the low-rank branch, broadcast to (B, T, N).
          query_mask: Queries that take part, (B, T) bool, or None.
          key_mask: Keys that take part, (B, S) bool, or None.
          branch_rng: Key for branch dropout, or None to keep the sparse branch of every example.

        Returns:
          The output and the values that a layer may sow: gates, lambda, multiplier and masses, (B, T, N) each.
        """
        if self.has_gate:
            return self._fused(query, key, value, hashes, beta, lam, gates, query_mask, key_mask, branch_rng)
        config = self.config
        shared: dict[str, Any] = {"is_causal": self.is_causal, "key_mask": key_mask}
        if self.kind == "performer":
            dispatch.check("performer_attention", self.implementation)
            branch = performer_attention(query, key, value, hashes["projection"], eps=config.fusion.eps, **shared)
            return branch.out, {"log_mass": branch.log_mass}
        shared["implementation"] = self.implementation
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
                **shared,
            )
        elif self.kind == "sort_lsh":
            sparse = config.sparse
            min_length = sparse.min_length
            if min_length == "auto":
                min_length = resolve_min_length(key.shape[1], self.is_causal)
            branch = sort_lsh_attention(
                query,
                key,
                value,
                hashes["lsh_planes"],
                block_size=sparse.block_size,
                min_length=min_length,
                num_neighbors=sparse.num_neighbors,
                pairing=sparse.pairing,
                query_mask=query_mask,
                **shared,
            )
        else:
            branch = exact_attention(query, key, value, **shared)
        return branch.out, {"log_mass": branch.log_mass}

    def _fused(
        self,
        query: Array,
        key: Array,
        value: Array,
        hashes: Mapping[str, Array],
        beta: float | Array | None,
        lam: float | Array,
        gates: Gates,
        query_mask: Array | None,
        key_mask: Array | None,
        branch_rng: Array | None,
    ) -> tuple[Array, dict[str, Array]]:
        config, kind, keep = self.config, self.fusion_kind, None
        if branch_rng is not None and self.branch_dropout_rate:
            keep = kept_examples(branch_rng, self.branch_dropout_rate, query.shape[0])
        arrays = query, key, value, hashes["race_planes"], hashes.get("lsh_planes")
        masks = query_mask, key_mask
        call = make_elsaa(*arrays, *masks, config, self.is_causal, None, self.implementation, kind)
        both = _attend_both(call, *arrays, config.race.beta if beta is None else beta, *masks, gates, lam, keep)
        if both.low_rank_log_mass is None:
            return both.out, {"log_mass": both.sparse.log_mass}
        masses, shape = (both.sparse.log_mass, both.low_rank_log_mass), both.sparse.log_mass.shape
        weights = {
            "gate_sparse": jnp.broadcast_to(jnp.asarray(gates[0], jnp.float32), shape),
            "gate_low_rank": jnp.broadcast_to(jnp.asarray(gates[1], jnp.float32), shape),
            "sparse_log_mass": masses[0],
            "low_rank_log_mass": masses[1],
        }
        if self.lambda_kind is not None:
            weights["lam"] = jnp.broadcast_to(jnp.asarray(lam, jnp.float32), shape)
        if self.lambda_kind is not None and kind != "lse":
            eps = jnp.full(shape, config.fusion.eps, jnp.float32)
            weights["multiplier"] = multiplier(*masses, weights["lam"], eps)
        return both.out, weights


_attend_both = jax.jit(attend_both, static_argnums=0)


MEANINGLESS_FIELDS = {
    "attention_fn": "this layer is the attention: choose one by `attention` (elsaa_jax.attention_fn "
    "gives a function for the hook of Flax's own layers)",
    "decode": "decoding with a cache does not exist here: call with the last tokens as inputs_q and all of them "
    "as inputs_k",
    "qk_attn_weights_einsum_cls": "there is no matrix of attention weights to compute",
    "attn_weights_value_einsum_cls": "there is no matrix of attention weights to multiply with",
}


def make_spec(
    attention: AttentionKind,
    config: ElsaaConfig,
    num_heads: int,
    num_kv_heads: int | None,
    qkv_features: int,
    dropout_rate: float,
    is_causal: bool,
    implementation: Implementation | None,
    refused: Mapping[str, Any],
) -> AttentionSpec:
    """Returns the attention of a layer; `refused` holds the Flax fields that have no meaning here."""
    refuse(refused, MEANINGLESS_FIELDS)
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate is {dropout_rate!r}; it must be a number >= 0 and < 1")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    return AttentionSpec(attention, config, num_heads, num_kv_heads, qkv_features, is_causal, implementation)


def refuse(fields: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises ValueError for a field that is set (not None or False) but has no meaning here."""
    for name, value in fields.items():
        if value:
            raise ValueError(f"{name} is {value!r}, but {reasons[name]}; it must be None or False")


def kept_examples(rng: Array, rate: float, batch: int) -> Array:
    """Draws (B,) bool with a share `rate` of False at random places: B * rate of them, rounded at random."""
    place_rng, round_rng = jax.random.split(rng)
    dropped = jnp.floor(batch * rate + jax.random.uniform(round_rng)).astype(jnp.int32)
    return jax.random.permutation(place_rng, batch) >= dropped
