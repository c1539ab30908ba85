"""The linen layer: swaps in for `flax.linen.MultiHeadDotProductAttention` in one line."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.linear import default_kernel_init
from flax.linen.module import merge_param

from elsaa_jax.config import ElsaaConfig
from elsaa_jax.layers import shared as layer
from elsaa_jax.layers.spec import AttentionSpec
from elsaa_jax.types import Array, AttentionKind, DType, Implementation


class Gate(nn.Module):
    """Linear - SiLU - Linear: the logits of the two gates.

    Attributes:
      hidden: width of the hidden layer.
      dtype: of the computation.
      param_dtype: of the parameters.
    """

    hidden: int
    dtype: DType | None = None
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """(..., features) -> (..., 2)."""
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype)
        return dense(2, name="out")(nn.silu(dense(self.hidden, name="hidden")(x)))


class ELSAA(nn.Module):
    """Multi-head ELSAA attention.

    Fields, call and parameter names are those of `nn.MultiHeadDotProductAttention`, whose
    checkpoints load; parameters of its own are added beside them (`gate`, `log_lambda`,
    `log_beta`, ...). Hash planes live in the collection "hashes": saved with the model, never
    trained. Dropout acts on the attention's output before the last projection, because there
    are no attention weights.

    Attributes:
      num_heads: N.
      dtype: of the computation; None: inferred.
      param_dtype: of the parameters.
      qkv_features: N * H; None: as the input.
      out_features: of the output; None: as the input.
      broadcast_dropout: one dropout mask for all examples and heads.
      dropout_rate: of the attention's output.
      deterministic: no dropout; here or in the call.
      precision: of the projections.
      kernel_init: of the projections.
      out_kernel_init: of the last one; None: `kernel_init`.
      bias_init: of the projections.
      out_bias_init: of the last one; None: `bias_init`.
      use_bias: whether the projections have biases.
      attention_fn: refused, see `attention`.
      decode: refused.
      normalize_qk: layer norm on query and key.
      force_fp32_for_softmax: no matter which: softmax is always float32.
      qkv_dot_general, out_dot_general, qkv_dot_general_cls, out_dot_general_cls: of the projections.
      qk_attn_weights_einsum_cls, attn_weights_value_einsum_cls: refused.
      num_kv_heads: K; None: as `num_heads`.
      is_causal: whether queries see the past alone.
      config: sizes of the branches, and the fusion.
      attention: "elsaa", "race", "sort_lsh", "sort_lsh_race" (m = 1), "exact" or "performer".
      implementation: see `elsaa_jax.dispatch`.
    """

    num_heads: int
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: Any = None
    kernel_init: Callable[..., Any] = default_kernel_init
    out_kernel_init: Callable[..., Any] | None = None
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    out_bias_init: Callable[..., Any] | None = None
    use_bias: bool = True
    attention_fn: None = None
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = True
    qkv_dot_general: Any = None
    out_dot_general: Any = None
    qkv_dot_general_cls: Any = None
    out_dot_general_cls: Any = None
    qk_attn_weights_einsum_cls: None = None
    attn_weights_value_einsum_cls: None = None
    num_kv_heads: int | None = None
    is_causal: bool = False
    config: ElsaaConfig = ElsaaConfig()
    attention: AttentionKind = "elsaa"
    implementation: Implementation | None = None

    def __post_init__(self) -> None:
        layer.refuse({name: getattr(self, name) for name in layer.MEANINGLESS_FIELDS}, layer.MEANINGLESS_FIELDS)
        layer.check_sizes(self.num_heads, self.qkv_features or self.num_heads, self.dropout_rate)
        self._spec(self.qkv_features or 2 * self.num_heads)
        super().__post_init__()

    def _spec(self, qkv_features: int) -> AttentionSpec:
        return AttentionSpec(
            self.attention,
            self.config,
            self.num_heads,
            self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            qkv_features // self.num_heads,
            self.is_causal,
            self.implementation,
        )

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        query_mask: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
    ) -> Array:
        """Attends from `inputs_q` to `inputs_k` and `inputs_v`.

        Args:
          inputs_q: (..., T, features).
          inputs_k: (..., S, features); None: `inputs_q`. With `is_causal` the queries are the
            last T of the S positions.
          inputs_v: (..., S, features); None: `inputs_k`.
          mask: (..., S) or (..., 1, 1, S), True = attend. In self-attention (`inputs_k` left out, or
            the same object as `inputs_q`) masked tokens do not query either.
          query_mask: (..., T), the tokens that query; None: as `mask` says.
          deterministic: no dropout; here or as a field.
          dropout_rng: for dropout; None: the stream "dropout".
          sow_weights: whether to sow gates, lambda, multiplier and masses, all (B, T, N), into
            "intermediates".

        Returns:
          (..., T, out_features).
        """
        call = layer.Inputs.of(inputs_q, inputs_k, inputs_v, mask, query_mask)
        features = call.query.shape[-1]
        qkv_features = self.qkv_features or features
        layer.check_sizes(self.num_heads, qkv_features, self.dropout_rate)
        spec = self._spec(qkv_features)
        query, key, value = self._project(spec, call)
        query, key = layer.rotate(spec, query, key)
        output_rng, branch_rng = self._dropout_rngs(spec, deterministic, dropout_rng)
        out, weights = spec.attend(
            query,
            key,
            value,
            self._hashes(spec),
            beta=self._beta(spec),
            lam=self._lambda(spec, query),
            gates=self._gates(spec, call.query, query),
            query_mask=call.query_mask,
            key_mask=call.key_mask,
            branch_rng=branch_rng,
        )
        if sow_weights:
            for name, weight in weights.items():
                self.sow("intermediates", name, weight)
        if output_rng is not None:
            out = layer.dropout(out, output_rng, self.dropout_rate, self.broadcast_dropout)
        out = nn.DenseGeneral(
            features=self.out_features or features,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )(out)
        return call.restore(out)

    def _project(self, spec, call):
        """q, k and v: projections, then layer norm, then short convolution, where asked for."""
        dense = functools.partial(
            nn.DenseGeneral,
            axis=-1,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            use_bias=self.use_bias,
            precision=self.precision,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)

        def projection(name, num_heads, norm_name):
            project = dense(features=(num_heads, spec.head_dim), name=name)
            normalize = norm(name=norm_name) if self.normalize_qk and norm_name else lambda x: x
            return lambda x: normalize(project(x))

        project_query = projection("query", spec.num_heads, "query_ln")
        query = project_query(call.query)
        key = projection("key", spec.num_kv_heads, "key_ln")(call.key)
        value = projection("value", spec.num_kv_heads, None)(call.value)
        if not self.config.short_conv:
            return query, key, value

        history = layer.query_history(spec, call, project_query)

        def convolve(name, x, mask, history=None):
            shape = (self.config.short_conv, *x.shape[2:])
            kernel = self.param(name, layer.random_taps, shape, self.param_dtype)
            return layer.short_convolution(x, kernel, mask, history)

        return (
            convolve("query_conv", query, call.convolution_mask(spec.is_causal), history),
            convolve("key_conv", key, call.key_mask),
            convolve("value_conv", value, call.key_mask),
        )

    def _dropout_rngs(self, spec, deterministic, dropout_rng):
        """Keys for dropout on the output and for branch dropout; None where there is none."""
        if not self.dropout_rate and not spec.branch_dropout_rate:
            return None, None
        if merge_param("deterministic", self.deterministic, deterministic):
            return None, None
        rng = self.make_rng("dropout") if dropout_rng is None else dropout_rng
        return layer.dropout_rngs(rng, self.dropout_rate, spec)

    def _hashes(self, spec):
        names = jax.eval_shape(spec.sample_hashes, jax.random.key(0))
        missing = [name for name in names if not self.has_variable("hashes", name)]
        if missing and not self.is_mutable_collection("hashes"):
            raise ValueError(
                f'the collection "hashes" has no {missing[0]!r}: its planes are part of the model; pass the variables '
                "of `init`, or of a checkpoint saved with them"
            )
        sampled = spec.sample_hashes(self.make_rng("hashes")) if missing else {}
        return {name: self.variable("hashes", name, lambda n=name: sampled[n]).value for name in names}

    def _beta(self, spec):
        if not spec.learns_beta:
            return None
        start = nn.initializers.constant(math.log(self.config.race.beta))
        return layer.beta_of(self.param("log_beta", start, (), self.param_dtype))

    def _lambda(self, spec, query):
        fusion = self.config.fusion
        if spec.lambda_kind == "scalar":
            start = nn.initializers.constant(math.log(fusion.lambda_init))
            return jnp.exp(self.param("log_lambda", start, (), self.param_dtype).astype(jnp.float32))
        if spec.lambda_kind == "query":
            shape = (spec.num_heads, spec.head_dim)
            kernel_init = nn.initializers.normal(layer.LAMBDA_KERNEL_STDDEV)
            kernel = self.param("lambda_kernel", kernel_init, shape, self.param_dtype)
            bias = self.param("lambda_bias", nn.initializers.zeros, shape[:1], self.param_dtype)
            offset_init = nn.initializers.constant(layer.LAMBDA_OFFSET)
            offset = self.param("lambda_offset", offset_init, shape[:1], self.param_dtype)
            return layer.query_lambda(query, kernel, bias, offset)
        return fusion.lambda_init

    def _gates(self, spec, inputs_q, query):
        if not spec.has_gate:
            return 1.0, 1.0
        fusion = self.config.fusion
        gate = Gate(fusion.gate_hidden, self.dtype, self.param_dtype, name="gate")
        return layer.gates_of(gate(inputs_q if fusion.gate_input == "input" else query))
