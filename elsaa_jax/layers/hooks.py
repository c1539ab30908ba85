"""Functions for the `attention_fn` hook of Flax's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax import nnx

from elsaa_jax.checks import check_weights
from elsaa_jax.config import ElsaaConfig
from elsaa_jax.layers.inputs import dropout, key_mask_of
from elsaa_jax.layers.spec import AttentionSpec, refuse
from elsaa_jax.types import Array, AttentionKind, Implementation


def attention_fn(
    hashes: dict[str, Array],
    attention: AttentionKind = "elsaa",
    *,
    config: ElsaaConfig = ElsaaConfig(),
    is_causal: bool = False,
    self_attention: bool = True,
    lam: float | Array = 1.0,
    gate_sparse: float | Array = 1.0,
    gate_low_rank: float | Array = 1.0,
    implementation: Implementation | None = None,
) -> Callable[..., Array]:
    """Returns an attention for `nn.MultiHeadDotProductAttention(attention_fn=...)` and `nnx.MultiHeadAttention`.

    Flax's layers own the projections. Planes, gates and lambda are fixed here. Dropout acts on the output, as in
    `ELSAA`.

    Args:
      hashes: Hash planes by name ("race_planes", "lsh_planes", "projection"), as far as the attention needs them.
        `sample_hashes` draws them.
      attention: Name of the attention.
      config: Settings of the branches and of the fusion.
      is_causal: Whether queries attend to their past only.
      self_attention: Whether as many queries as keys are the same tokens, so that masked tokens do not query either.
      lam: Lambda, broadcast to (B, T, N).
      gate_sparse: Gate of the sparse branch, broadcast to (B, T, N).
      gate_low_rank: Gate of the low-rank branch, broadcast to (B, T, N).
      implementation: "xla", "pallas" or "interpret"; by default the best for each platform (`elsaa_jax.dispatch`).

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from elsaa_jax import attention_fn, sample_hashes
      >>> hashes = sample_hashes(jax.random.key(0), head_dim=8)
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn(hashes, is_causal=True))
      >>> layer.init_with_output(jax.random.key(1), jnp.ones((2, 300, 32)))[0].shape
      (2, 300, 32)
    """
    AttentionSpec(attention, config, 1, 1, 2, is_causal, implementation)
    _check_hashes(hashes, attention)
    reason = "belongs to the layer ELSAA: a function for Flax's own layers has no parameters and no training mode"
    refuse(
        {
            "config.short_conv": config.short_conv,
            "config.rotary_base": config.rotary_base,
            "branch_dropout_rate": config.fusion.branch_dropout_rate,
        },
        {"config.short_conv": reason, "config.rotary_base": reason, "branch_dropout_rate": reason},
    )
    always_causal = is_causal

    # linen drops keywords that the signature does not name, and nnx passes them all: name them.
    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        is_causal: bool = False,
    ) -> Array:
        # Precision concerns the projections, and the softmax is always computed in float32.
        del precision, force_fp32_for_softmax
        refuse({"bias": bias is not None}, {"bias": "there is no matrix of logits to add it to"})
        reason = "there is no matrix of attention weights"
        refuse(
            {"qk_attn_weights_einsum": qk_attn_weights_einsum, "attn_weights_value_einsum": attn_weights_value_einsum},
            {"qk_attn_weights_einsum": reason, "attn_weights_value_einsum": reason},
        )
        *lead, num_queries, num_heads, head_dim = query.shape
        query, key, value = (
            x.reshape(-1, *x.shape[-3:]).astype(x.dtype if dtype is None else dtype) for x in (query, key, value)
        )
        causal = is_causal or always_causal
        for name, weight in (("gate_sparse", gate_sparse), ("gate_low_rank", gate_low_rank), ("lam", lam)):
            check_weights(name, weight, query.shape[:3])
        sizes = num_heads, key.shape[2], num_heads * head_dim
        spec = AttentionSpec(attention, config, *sizes, causal, implementation)
        key_mask = key_mask_of("mask", mask, tuple(lead), num_queries, key.shape[1])
        out, weights = spec.attend(
            query,
            key,
            value,
            hashes,
            lam=lam,
            gates=(gate_sparse, gate_low_rank),
            query_mask=key_mask if self_attention and num_queries == key.shape[1] else None,
            key_mask=key_mask,
        )
        if module is not None:
            collection = "intermediates" if isinstance(module, nn.Module) else nnx.Intermediate
            for name, weight in weights.items():
                module.sow(collection, name, weight)
        if dropout_rate > 0.0 and not deterministic:
            if dropout_rng is None:
                raise ValueError("dropout_rng is None; with dropout_rate > 0 and deterministic=False it must be a key")
            out = dropout(out, dropout_rng, dropout_rate, broadcast_dropout)
        return out.reshape(*lead, num_queries, num_heads, head_dim)

    return attend


def _check_hashes(hashes: dict[str, Array], attention: AttentionKind) -> None:
    needed = {"sort_lsh": ["lsh_planes"], "performer": ["projection"], "exact": []}.get(attention, ["race_planes"])
    for name in needed:
        if name not in hashes:
            raise ValueError(
                f"hashes has {sorted(hashes)}, but attention={attention!r} needs {name!r}; draw them by `sample_hashes`"
            )


def sample_hashes(
    rng: Array,
    head_dim: int,
    attention: AttentionKind = "elsaa",
    *,
    config: ElsaaConfig = ElsaaConfig(),
    num_kv_heads: int | None = None,
) -> dict[str, Array]:
    """Draws hash planes for `attention_fn`.

    Args:
      rng: Random key.
      head_dim: H.
      attention: Name of the attention.
      config: Settings of the branches.
      num_kv_heads: K, for one set of planes each; by default one set serves all heads.

    Example:
      >>> import jax
      >>> from elsaa_jax import sample_hashes
      >>> sample_hashes(jax.random.key(0), head_dim=16)["race_planes"].shape  # 4 tables of 4 bits
      (4, 4, 16)
    """
    heads = 1 if num_kv_heads is None else num_kv_heads
    hashes = AttentionSpec(attention, config, heads, heads, heads * head_dim, False, None).sample_hashes(rng)
    return {name: x[0] for name, x in hashes.items()} if num_kv_heads is None else hashes
