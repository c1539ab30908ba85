"""The nnx layer: replaces `flax.nnx.MultiHeadAttention`, and is the twin of `elsaa_jax.linen.ELSAA`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init

from elsaa_jax.config import ElsaaConfig
from elsaa_jax.layers.inputs import Inputs, convolution_parameters, convolve_and_rotate, dropout
from elsaa_jax.layers.parameters import fusion_parameters, fusion_values
from elsaa_jax.layers.spec import make_spec
from elsaa_jax.types import Array, AttentionKind, DType, Implementation


class HashPlanes(nnx.Variable):
    """Hash planes. They are saved with the model and never trained."""


class Gate(nnx.Module):
    """A network Linear - SiLU - Linear that computes the logits of the two gates."""

    def __init__(self, features: int, hidden: int, *, dtype: DType | None, param_dtype: DType, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.hidden = linear(features, hidden)
        self.out = linear(hidden, 2)

    def __call__(self, x: Array) -> Array:
        """Computes the logits (..., 2) from (..., features)."""
        return self.out(nnx.silu(self.hidden(x)))


class ELSAA(nnx.Module):
    """A multi-head attention layer that replaces `nnx.MultiHeadAttention`.

    Arguments and parameters have the names of `nnx.MultiHeadAttention`, without its dot_general, promotion, metadata
    and sharding arguments. `elsaa_jax.linen.ELSAA` explains `is_causal`, `config`, `attention` and `implementation`.
    `decode` and `attention_fn` are refused. Hash planes are `HashPlanes` variables.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from elsaa_jax.nnx import ELSAA
      >>> layer = ELSAA(num_heads=4, in_features=32, is_causal=True, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 300, 32))).shape
      (2, 300, 32)
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
        sizes = num_heads, num_kv_heads, in_features if qkv_features is None else qkv_features, dropout_rate
        refused = {"attention_fn": attention_fn, "decode": decode}
        self.spec = make_spec(attention, config, *sizes, is_causal, implementation, refused)
        head_dim, num_kv_heads = self.spec.head_dim, self.spec.num_kv_heads
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
        for name, (init, shape) in (convolution_parameters(self.spec) | fusion_parameters(self.spec)).items():
            setattr(self, name, nnx.Param(init(rngs.params(), shape, param_dtype)))
        if self.spec.has_gate:
            features = in_features if config.fusion.gate_input == "input" else head_dim
            self.gate = Gate(features, config.fusion.gate_hidden, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        for name, planes in self.spec.sample_hashes((rngs.hashes if "hashes" in rngs else rngs.params)()).items():
            setattr(self, name, HashPlanes(planes))
        random = dropout_rate > 0 or self.spec.branch_dropout_rate > 0
        self.rngs = rngs.dropout.fork() if random else None

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
        """Attends from `inputs_q` to `inputs_k` and `inputs_v`.

        Args:
          inputs_q: Inputs of the queries, (..., T, features).
          inputs_k: Inputs of the keys, (..., S, features); `inputs_q` by default. With `is_causal` the queries are the
            last T of the S positions.
          inputs_v: Inputs of the values, (..., S, features); `inputs_k` by default.
          mask: Keys that take part, (..., S) or (..., 1, 1, S), True = attend.
          query_mask: Queries that take part, (..., T); by default, in self-attention, as `mask` says.
          deterministic: Whether to leave out dropout. Set it here or in the constructor.
          rngs: Random keys for dropout; those of the constructor by default.
          sow_weights: Whether to sow gates, lambda, multiplier and masses as `nnx.Intermediate`, for `nnx.capture`.

        Returns:
          The output, (..., T, out_features).
        """
        spec = self.spec
        call = Inputs.of(inputs_q, inputs_k, inputs_v, mask, query_mask)
        if call.query.shape[-1] != self.in_features:
            raise ValueError(f"inputs_q has {call.query.shape[-1]} features; it must have {self.in_features}")
        query, key, value = self._project(call)
        output_rng, branch_rng = self._dropout_rngs(deterministic, rngs)
        gate_logits = None
        if spec.has_gate:
            gate_logits = self.gate(call.query if spec.config.fusion.gate_input == "input" else query)
        parameters = {name: getattr(self, name)[...] for name in fusion_parameters(spec)}
        beta, lam, gates = fusion_values(spec, parameters, gate_logits, query)
        hashes = {name: getattr(self, name)[...] for name in spec.hash_names}
        masks = {"query_mask": call.query_mask, "key_mask": call.key_mask}
        out, weights = spec.attend(
            query, key, value, hashes, beta=beta, lam=lam, gates=gates, branch_rng=branch_rng, **masks
        )
        if sow_weights:
            for name, weight in weights.items():
                self.sow(nnx.Intermediate, name, weight)
        if output_rng is not None and self.dropout_rate:
            out = dropout(out, output_rng, self.dropout_rate, self.broadcast_dropout)
        out = self.out(out)
        return out.reshape(*call.lead, *out.shape[1:])

    def _project(self, call: Inputs) -> tuple[Array, Array, Array]:
        """Computes q, k and v: projection, layer norm, short convolution and rotary positions."""

        def project_query(x: Array) -> Array:
            x = self.query(x)
            return x if self.query_ln is None else self.query_ln(x)

        query, key, value = project_query(call.query), self.key(call.key), self.value(call.value)
        if self.key_ln is not None:
            key = self.key_ln(key)
        taps = [getattr(self, name)[...] for name in convolution_parameters(self.spec)]
        return convolve_and_rotate(self.spec, call, query, key, value, taps, project_query)

    def _dropout_rngs(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> tuple[Array | None, Array | None]:
        """Returns keys for dropout on the output and for branch dropout; None without dropout."""
        if not self.dropout_rate and not self.spec.branch_dropout_rate:
            return None, None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError("deterministic is None; with dropout it must be True or False, in the call or as a field")
        if deterministic:
            return None, None
        rngs = self.rngs if rngs is None else rngs
        assert rngs is not None
        output_rng, branch_rng = jax.random.split(rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs())
        return output_rng, branch_rng
