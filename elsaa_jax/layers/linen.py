"""The linen layer: replaces `flax.linen.MultiHeadDotProductAttention` in one line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.linear import default_kernel_init
from flax.linen.module import merge_param

from elsaa_jax.config import ElsaaConfig
from elsaa_jax.layers.inputs import Inputs, convolution_parameters, convolve_and_rotate, dropout
from elsaa_jax.layers.parameters import fusion_parameters, fusion_values
from elsaa_jax.layers.spec import MEANINGLESS_FIELDS, AttentionSpec, make_spec
from elsaa_jax.types import Array, AttentionKind, DType, Implementation


class Gate(nn.Module):
    """A network Linear - SiLU - Linear that computes the logits of the two gates.

    Attributes:
      hidden: Width of the hidden layer.
      dtype: Dtype of the computation.
      param_dtype: Dtype of the parameters.
    """

    hidden: int
    dtype: DType | None = None
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Computes the logits (..., 2) from (..., features)."""
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype)
        return dense(2, name="out")(nn.silu(dense(self.hidden, name="hidden")(x)))


class ELSAA(nn.Module):
    """A multi-head attention layer that replaces `nn.MultiHeadDotProductAttention`.

    It has the fields, the call and the parameter names of `nn.MultiHeadDotProductAttention`, and loads its
    checkpoints. It adds parameters of its own (`gate`, `log_lambda`, `log_beta`, ...). Hash planes live in the
    collection "hashes": they are saved with the model and never trained. Dropout acts on the output of the attention
    before the last projection, because a matrix of attention weights does not exist.

    Attributes:
      num_heads: Number of query heads, N.
      dtype: Dtype of the computation; inferred by default.
      param_dtype: Dtype of the parameters.
      qkv_features: Width of the queries, N * H; the width of the input by default.
      out_features: Width of the output; the width of the input by default.
      broadcast_dropout: Whether one dropout mask serves all examples and heads.
      dropout_rate: Dropout rate of the attention's output.
      deterministic: Whether to leave out dropout. Set it here or in the call.
      precision: Precision of the projections.
      kernel_init: Initializer of the projections.
      out_kernel_init: Initializer of the last projection; `kernel_init` by default.
      bias_init: Initializer of the biases.
      out_bias_init: Initializer of the last bias; `bias_init` by default.
      use_bias: Whether the projections have biases.
      attention_fn: Refused; see `attention`.
      decode: Refused.
      normalize_qk: Whether to apply layer norm to queries and keys.
      force_fp32_for_softmax: Accepted for compatibility. The softmax is always computed in float32.
      qkv_dot_general: Dot product of the first projections.
      out_dot_general: Dot product of the last projection.
      qkv_dot_general_cls: Class of the dot product of the first projections.
      out_dot_general_cls: Class of the dot product of the last projection.
      qk_attn_weights_einsum_cls: Refused.
      attn_weights_value_einsum_cls: Refused.
      num_kv_heads: Number of key/value heads, K; `num_heads` by default.
      is_causal: Whether queries attend to their past only.
      config: Settings of the branches and of the fusion.
      attention: Name of the attention: "elsaa", "race", "sort_lsh", "sort_lsh_race" (m = 1), "exact" or "performer".
      implementation: "xla", "pallas" or "interpret"; by default the best for each platform (`elsaa_jax.dispatch`).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from elsaa_jax import ELSAA
      >>> x = jnp.ones((2, 300, 32))
      >>> layer = ELSAA(num_heads=4, is_causal=True)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape
      (2, 300, 32)
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
        self._spec(self.qkv_features or 2 * self.num_heads)
        super().__post_init__()

    def _spec(self, qkv_features: int) -> AttentionSpec:
        sizes = self.num_heads, self.num_kv_heads, qkv_features, self.dropout_rate
        refused = {name: getattr(self, name) for name in MEANINGLESS_FIELDS}
        return make_spec(self.attention, self.config, *sizes, self.is_causal, self.implementation, refused)

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
          inputs_q: Inputs of the queries, (..., T, features).
          inputs_k: Inputs of the keys, (..., S, features); `inputs_q` by default. With `is_causal` the queries are the
            last T of the S positions.
          inputs_v: Inputs of the values, (..., S, features); `inputs_k` by default.
          mask: Keys that take part, (..., S) or (..., 1, 1, S), True = attend. In self-attention (`inputs_k` is left
            out, or is the same object as `inputs_q`) masked tokens do not query either.
          query_mask: Queries that take part, (..., T); by default as `mask` says.
          deterministic: Whether to leave out dropout. Set it here or as a field.
          dropout_rng: Key for dropout; by default a key of the stream "dropout".
          sow_weights: Whether to sow gates, lambda, multiplier and masses, (B, T, N) each, into "intermediates".

        Returns:
          The output, (..., T, out_features).
        """
        call = Inputs.of(inputs_q, inputs_k, inputs_v, mask, query_mask)
        features = call.query.shape[-1]
        spec = self._spec(self.qkv_features or features)
        query, key, value = self._project(spec, call)
        output_rng, branch_rng = self._dropout_rngs(spec, deterministic, dropout_rng)
        hashes = self._hashes(spec)
        gate_logits, fusion = None, self.config.fusion
        if spec.has_gate:
            gate = Gate(fusion.gate_hidden, self.dtype, self.param_dtype, name="gate")
            gate_logits = gate(call.query if fusion.gate_input == "input" else query)
        parameters = {}
        for name, (init, shape) in fusion_parameters(spec).items():
            parameters[name] = self.param(name, init, shape, self.param_dtype)
        beta, lam, gates = fusion_values(spec, parameters, gate_logits, query)
        masks = {"query_mask": call.query_mask, "key_mask": call.key_mask}
        out, weights = spec.attend(
            query, key, value, hashes, beta=beta, lam=lam, gates=gates, branch_rng=branch_rng, **masks
        )
        if sow_weights:
            for name, weight in weights.items():
                self.sow("intermediates", name, weight)
        if output_rng is not None and self.dropout_rate:
            out = dropout(out, output_rng, self.dropout_rate, self.broadcast_dropout)
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
        return out.reshape(*call.lead, *out.shape[1:])

    def _project(self, spec: AttentionSpec, call: Inputs) -> tuple[Array, Array, Array]:
        """Computes q, k and v: projection, layer norm, short convolution and rotary positions."""
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

        def projection(name: str, num_heads: int, norm_name: str | None) -> Callable[[Array], Array]:
            project = dense(features=(num_heads, spec.head_dim), name=name)
            normalize = norm(name=norm_name) if self.normalize_qk and norm_name else None
            return lambda x: project(x) if normalize is None else normalize(project(x))

        project_query = projection("query", spec.num_heads, "query_ln")
        query = project_query(call.query)
        key = projection("key", spec.num_kv_heads, "key_ln")(call.key)
        value = projection("value", spec.num_kv_heads, None)(call.value)
        taps = []
        for name, (init, shape) in convolution_parameters(spec).items():
            taps.append(self.param(name, init, shape, self.param_dtype))
        return convolve_and_rotate(spec, call, query, key, value, taps, project_query)

    def _dropout_rngs(
        self, spec: AttentionSpec, deterministic: bool | None, dropout_rng: Array | None
    ) -> tuple[Array | None, Array | None]:
        """Returns keys for dropout on the output and for branch dropout; None without dropout."""
        if not self.dropout_rate and not spec.branch_dropout_rate:
            return None, None
        if merge_param("deterministic", self.deterministic, deterministic):
            return None, None
        output_rng, branch_rng = jax.random.split(self.make_rng("dropout") if dropout_rng is None else dropout_rng)
        return output_rng, branch_rng

    def _hashes(self, spec: AttentionSpec) -> dict[str, Array]:
        """Returns the planes of the collection "hashes", which `init` draws."""
        hashes: dict[str, Any] = {}
        sampled: dict[str, Array] = {}
        for name in spec.hash_names:
            if not self.has_variable("hashes", name) and not sampled:
                if not self.is_mutable_collection("hashes"):
                    raise ValueError(
                        f'the collection "hashes" has no {name!r}: its planes are part of the model; pass the '
                        "variables of `init`, or of a checkpoint saved with them"
                    )
                sampled = spec.sample_hashes(self.make_rng("hashes"))
            hashes[name] = self.variable("hashes", name, sampled.get, name).value
        return hashes
