"""The nnx layer: the twin of `elsaa_jax.linen.ELSAA`, with the fields of `flax.nnx.MultiHeadAttention`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init

from elsaa_jax.config import ElsaaConfig
from elsaa_jax.layers import shared as layer
from elsaa_jax.layers.spec import HASH_NAMES, AttentionSpec
from elsaa_jax.types import Array, AttentionKind, DType, Implementation


class HashPlanes(nnx.Variable):
    """Hash planes: saved with the model, never trained."""


class Gate(nnx.Module):
    """Linear - SiLU - Linear: the logits of the two gates."""

    def __init__(self, features: int, hidden: int, *, dtype: DType | None, param_dtype: DType, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.hidden = linear(features, hidden)
        self.out = linear(hidden, 2)

    def __call__(self, x: Array) -> Array:
        """(..., features) -> (..., 2)."""
        return self.out(nnx.silu(self.hidden(x)))


class ELSAA(nnx.Module):
    """Multi-head ELSAA attention; see `elsaa_jax.linen.ELSAA` for what each argument means.

    Names of arguments and parameters are those of `nnx.MultiHeadAttention`, without its
    dot_general, promotion, metadata and sharding arguments; `is_causal`, `config`, `attention` and
    `implementation` are as in the linen layer. `decode` and `attention_fn` are refused. Hash planes
    are `HashPlanes` variables.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        broadcast_dropout: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Any = None,
        kernel_init: Callable[..., Any] = default_kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        bias_init: Callable[..., Any] = nnx.initializers.zeros,
        out_bias_init: Callable[..., Any] | None = None,
        use_bias: bool = True,
        attention_fn: None = None,
        decode: bool | None = None,
        normalize_qk: bool = False,
        is_causal: bool = False,
        config: ElsaaConfig = ElsaaConfig(),
        attention: AttentionKind = "elsaa",
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        reasons = {name: layer.MEANINGLESS_FIELDS[name] for name in ("attention_fn", "decode")}
        layer.refuse({"attention_fn": attention_fn, "decode": decode}, reasons)
        qkv_features = in_features if qkv_features is None else qkv_features
        layer.check_sizes(num_heads, qkv_features, dropout_rate)
        head_dim = qkv_features // num_heads
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.spec = AttentionSpec(attention, config, num_heads, num_kv_heads, head_dim, is_causal, implementation)
        self.in_features = in_features
        self.dropout_rate, self.deterministic, self.broadcast_dropout = dropout_rate, deterministic, broadcast_dropout
        common: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "rngs": rngs,
        }
        linear = functools.partial(nnx.LinearGeneral, kernel_init=kernel_init, bias_init=bias_init, **common)
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.query = linear(in_features, out_features=(num_heads, head_dim))
        self.key = linear(in_kv_features, out_features=(num_kv_heads, head_dim))
        self.value = linear(in_kv_features, out_features=(num_kv_heads, head_dim))
        self.out = nnx.LinearGeneral(
            in_features=(num_heads, head_dim),
            out_features=in_features if out_features is None else out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            **common,
        )
        norm = functools.partial(
            nnx.LayerNorm, head_dim, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.query_ln = norm() if normalize_qk else nnx.data(None)
        self.key_ln = norm() if normalize_qk else nnx.data(None)
        self._make_fusion_parameters(dtype, param_dtype, rngs)
        for name, planes in self.spec.sample_hashes((rngs.hashes if "hashes" in rngs else rngs.params)()).items():
            setattr(self, name, HashPlanes(planes))
        random = dropout_rate > 0 or self.spec.branch_dropout_rate > 0
        self.rngs = rngs.dropout.fork() if random else None

    def _make_fusion_parameters(self, dtype, param_dtype, rngs):
        spec, config = self.spec, self.spec.config
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        if config.short_conv:
            query_shape, key_shape = ((config.short_conv, n, dim) for n in (heads, kv_heads))
            self.query_conv = nnx.Param(layer.random_taps(rngs.params(), query_shape, param_dtype))
            self.key_conv = nnx.Param(layer.random_taps(rngs.params(), key_shape, param_dtype))
            self.value_conv = nnx.Param(layer.random_taps(rngs.params(), key_shape, param_dtype))
        if spec.learns_beta:
            self.log_beta = nnx.Param(jnp.asarray(math.log(config.race.beta), param_dtype))
        if spec.lambda_kind == "scalar":
            self.log_lambda = nnx.Param(jnp.asarray(math.log(config.fusion.lambda_init), param_dtype))
        if spec.lambda_kind == "query":
            kernel_init = nnx.initializers.normal(layer.LAMBDA_KERNEL_STDDEV)
            self.lambda_kernel = nnx.Param(kernel_init(rngs.params(), (heads, dim), param_dtype))
            self.lambda_bias = nnx.Param(jnp.zeros((heads,), param_dtype))
            self.lambda_offset = nnx.Param(jnp.full((heads,), layer.LAMBDA_OFFSET, param_dtype))
        if spec.has_gate:
            features = self.in_features if config.fusion.gate_input == "input" else dim
            self.gate = Gate(features, config.fusion.gate_hidden, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        query_mask: Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
    ) -> Array:
        """Attends from `inputs_q` to `inputs_k` and `inputs_v`; as the linen layer.

        Args:
          inputs_q: (..., T, features).
          inputs_k: (..., S, features); None: `inputs_q`.
          inputs_v: (..., S, features); None: `inputs_k`.
          mask: (..., S) or (..., 1, 1, S), True = attend.
          query_mask: (..., T), the tokens that query; None: in self-attention as `mask` says.
          deterministic: no dropout; here or in the constructor.
          rngs: for dropout; None: those of the constructor.
          sow_weights: whether to sow gates, lambda, multiplier and masses as `nnx.Intermediate`, for
            `nnx.capture`.

        Returns:
          (..., T, out_features).
        """
        call = layer.Inputs.of(inputs_q, inputs_k, inputs_v, mask, query_mask)
        if call.query.shape[-1] != self.in_features:
            raise ValueError(f"inputs_q has {call.query.shape[-1]} features; it must have {self.in_features}")
        query, key, value = self._project(call)
        query, key = layer.rotate(self.spec, query, key)
        output_rng, branch_rng = self._dropout_rngs(deterministic, rngs)
        out, weights = self.spec.attend(
            query,
            key,
            value,
            {name: x[...] for name in HASH_NAMES if (x := getattr(self, name, None)) is not None},
            beta=layer.beta_of(self.log_beta[...]) if self.spec.learns_beta else None,
            lam=self._lambda(query),
            gates=self._gates(call.query, query),
            query_mask=call.query_mask,
            key_mask=call.key_mask,
            branch_rng=branch_rng,
        )
        if sow_weights:
            for name, weight in weights.items():
                self.sow(nnx.Intermediate, name, weight)
        if output_rng is not None:
            out = layer.dropout(out, output_rng, self.dropout_rate, self.broadcast_dropout)
        return call.restore(self.out(out))

    def _project(self, call):
        def project_query(x):
            x = self.query(x)
            return x if self.query_ln is None else self.query_ln(x)

        query, key, value = project_query(call.query), self.key(call.key), self.value(call.value)
        if self.key_ln is not None:
            key = self.key_ln(key)
        if not self.spec.config.short_conv:
            return query, key, value
        history = layer.query_history(self.spec, call, project_query)
        return (
            layer.short_convolution(query, self.query_conv[...], call.convolution_mask(self.spec.is_causal), history),
            layer.short_convolution(key, self.key_conv[...], call.key_mask),
            layer.short_convolution(value, self.value_conv[...], call.key_mask),
        )

    def _dropout_rngs(self, deterministic, rngs):
        if not self.dropout_rate and not self.spec.branch_dropout_rate:
            return None, None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError("deterministic is None; with dropout it must be True or False, in the call or as a field")
        if deterministic:
            return None, None
        rngs = self.rngs if rngs is None else rngs
        rng = rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs()
        return layer.dropout_rngs(rng, self.dropout_rate, self.spec)

    def _lambda(self, query):
        if self.spec.lambda_kind == "scalar":
            return jnp.exp(self.log_lambda[...].astype(jnp.float32))
        if self.spec.lambda_kind == "query":
            return layer.query_lambda(query, self.lambda_kernel[...], self.lambda_bias[...], self.lambda_offset[...])
        return self.spec.config.fusion.lambda_init

    def _gates(self, inputs_q, query):
        if not self.spec.has_gate:
            return 1.0, 1.0
        use_input = self.spec.config.fusion.gate_input == "input"
        return layer.gates_of(self.gate(inputs_q if use_input else query))
