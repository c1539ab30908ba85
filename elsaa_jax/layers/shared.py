"""What the linen and the nnx layer share beside the attention itself: inputs, checks, small pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from elsaa_jax.checks import check_int
from elsaa_jax.config import BETA_RANGE
from elsaa_jax.layers.spec import AttentionSpec
from elsaa_jax.types import Array

LAMBDA_OFFSET = 0.3  # c of c + sigmoid(w . q + b), which starts at 0.8
LAMBDA_FLOOR = 1e-6
LAMBDA_KERNEL_STDDEV = 1e-3


class Inputs(NamedTuple):
    """The arguments of a layer's call, as both layers need them.

    Attributes:
      query: (B, T, features).
      key: (B, S, features).
      value: (B, S, features).
      query_mask: (B, T) or None; in self-attention the mask of the keys.
      key_mask: (B, S) or None.
      lead: the batch axes of the inputs, of which B is the product.
    """

    query: Array
    key: Array
    value: Array
    query_mask: Array | None
    key_mask: Array | None
    lead: tuple[int, ...]

    @classmethod
    def of(
        cls,
        inputs_q: Array,
        inputs_k: Array | None,
        inputs_v: Array | None,
        mask: Array | None,
        query_mask: Array | None,
    ) -> Inputs:
        """Fills in what was left out, and folds the batch axes into one."""
        if inputs_k is None and inputs_v is not None:
            raise ValueError(
                f"inputs_v has shape {inputs_v.shape} and inputs_k is None; give inputs_k, and leave out inputs_v "
                "where it is the same"
            )
        is_self = inputs_k is None or inputs_k is inputs_q
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        for name, x in (("inputs_q", inputs_q), ("inputs_k", inputs_k), ("inputs_v", inputs_v)):
            if jnp.ndim(x) < 2 or jnp.shape(x)[:-2] != jnp.shape(inputs_q)[:-2]:
                raise ValueError(
                    f"{name} has shape {jnp.shape(x)}; it must be (..., length, features) with the batch axes of "
                    f"inputs_q, {jnp.shape(inputs_q)[:-2]}"
                )
        lead = inputs_q.shape[:-2]
        key_mask = key_mask_of(mask, lead, inputs_q.shape[-2], inputs_k.shape[-2])
        if query_mask is None:
            query_mask = key_mask if is_self else None
        else:
            query_mask = key_mask_of(query_mask, lead, inputs_q.shape[-2], inputs_q.shape[-2])
        query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (inputs_q, inputs_k, inputs_v))
        return cls(query, key, value, query_mask, key_mask, lead)

    def convolution_mask(self, is_causal: bool) -> Array | None:
        """The queries that count in their short convolution: causal ones are the last T positions."""
        if is_causal and self.query_mask is None and self.key_mask is not None:
            return self.key_mask[:, -self.query.shape[1] :]
        return self.query_mask

    def restore(self, x: Array) -> Array:
        """(B, ...) -> (*lead, ...)."""
        return x.reshape(*self.lead, *x.shape[1:])


def check_sizes(num_heads: int, qkv_features: int, dropout_rate: float) -> None:
    """Refuses features that the heads do not divide, and a dropout rate that is none."""
    check_int("num_heads", num_heads, 1)
    check_int("qkv_features", qkv_features, 1)
    if qkv_features % num_heads:
        raise ValueError(f"qkv_features is {qkv_features}; it must be a multiple of num_heads = {num_heads}")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate is {dropout_rate!r}; it must be a number >= 0 and < 1")


def refuse(fields: dict[str, Any], reasons: dict[str, str]) -> None:
    """Raises ValueError for a Flax field that is set (not None or False) but has no meaning here."""
    for name, reason in reasons.items():
        if fields[name]:
            raise ValueError(f"{name} is {fields[name]!r}, but {reason}; it must be None or False")


MEANINGLESS_FIELDS = {
    "attention_fn": "this layer is the attention: choose one by `attention` (elsaa_jax.attention_fn "
    "gives a function for the hook of Flax's own layers)",
    "decode": "decoding with a cache does not exist here: call with the last tokens as inputs_q and all of them "
    "as inputs_k",
    "qk_attn_weights_einsum_cls": "there is no matrix of attention weights to compute",
    "attn_weights_value_einsum_cls": "there is no matrix of attention weights to multiply with",
}


def key_mask_of(mask: Array | None, lead: tuple[int, ...], num_queries: int, num_keys: int) -> Array | None:
    """A Flax mask, (..., S) or (..., 1, 1, S), as (B, S) bool.

    Args:
      mask: True or nonzero = attend.
      lead: the batch axes of the inputs; the mask's may be 1.
      num_queries: T.
      num_keys: S.
    """
    if mask is None:
        return None
    shape = jnp.shape(mask)
    fits = len(shape) in (len(lead) + 1, len(lead) + 3) and shape[-1] == num_keys
    fits = fits and all(a in (1, b) for a, b in zip(shape, lead, strict=False))
    fits = fits and all(a == 1 for a in shape[len(lead) : -1])
    if not fits:
        raise ValueError(
            f"mask has shape {shape}; for {num_queries} queries and {num_keys} keys it must be "
            f"{(*lead, num_keys)} or {(*lead, 1, 1, num_keys)}, as a key_mask. A mask over pairs of tokens would be "
            "of quadratic size: use is_causal=True for a causal mask"
        )
    mask = jnp.asarray(mask).astype(bool).reshape(*shape[: len(lead)], num_keys)
    return jnp.broadcast_to(mask, (*lead, num_keys)).reshape(-1, num_keys)


def short_convolution(x: Array, kernel: Array, mask: Array | None, history: Array | None = None) -> Array:
    """A depthwise causal convolution over tokens: y_t = sum_j kernel_j x_{t-j}.

    Args:
      x: (B, tokens, heads, H).
      kernel: (taps, heads, H); tap 0 is the token itself.
      mask: (B, tokens), masked tokens count as 0; or None.
      history: (B, up to taps - 1, heads, H), the tokens before the first; None: there are none.
    """
    x = zero_tokens(x, mask)
    length, taps = x.shape[1], kernel.shape[0]
    if history is not None:
        x = jnp.concatenate([history, x], axis=1)
    x = jnp.pad(x, [(0, 0), (max(0, length + taps - 1 - x.shape[1]), 0), (0, 0), (0, 0)])
    kernel = kernel.astype(x.dtype)
    shifted = (x[:, taps - 1 - j : taps - 1 - j + length] * kernel[j][None, None] for j in range(taps))
    return sum(shifted, start=jnp.zeros((), x.dtype))


def zero_tokens(x: Array, mask: Array | None) -> Array:
    """(B, tokens, heads, H), 0 where masked."""
    return x if mask is None else jnp.where(mask[:, :, None, None], x, 0)


def query_history(spec: AttentionSpec, call: Inputs, project: Callable[[Array], Array]) -> Array | None:
    """The queries before the first that its short convolution sees, 0 where masked; None: there are none.

    Causal queries are the last T of S positions, so what stands before them are the keys' inputs.

    Args:
      spec: the attention.
      call: the inputs.
      project: inputs (B, tokens, features) -> queries (B, tokens, N, H).
    """
    first = call.key.shape[1] - call.query.shape[1]
    taps = min(spec.config.short_conv - 1, first)
    if not spec.is_causal or taps <= 0:
        return None
    if call.key.shape[-1] != call.query.shape[-1]:
        raise ValueError(
            f"inputs_k has {call.key.shape[-1]} features and inputs_q {call.query.shape[-1]}; with short_conv and "
            "is_causal the queries are the last of the keys' positions, so they must be equal"
        )
    before = slice(first - taps, first)
    return zero_tokens(project(call.key[:, before]), None if call.key_mask is None else call.key_mask[:, before])


def rotate(spec: AttentionSpec, query: Array, key: Array) -> tuple[Array, Array]:
    """Rotary positions of q and k, where the config asks for them: x_i and x_{i + H/2} are turned as one pair.

    Args:
      spec: the attention; causal queries are the last T of S positions, others the first.
      query: (B, T, N, H).
      key: (B, S, K, H).
    """
    base, half = spec.config.rotary_base, spec.head_dim // 2
    if not base:
        return query, key
    rates = base ** (-jnp.arange(half, dtype=jnp.float32) / half)

    def turn(x: Array, first: int) -> Array:
        places = first + jnp.arange(x.shape[1], dtype=jnp.float32)
        angles = (places[:, None] * rates[None, :])[None, :, None, :]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        left, right = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
        return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1).astype(x.dtype)

    return turn(query, key.shape[1] - query.shape[1] if spec.is_causal else 0), turn(key, 0)


def random_taps(rng: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """The start of a short convolution: normal, of variance 1 / taps, so that tokens mix and keep their scale."""
    return jax.random.normal(rng, shape, dtype) * shape[0] ** -0.5


def query_lambda(query: Array, kernel: Array, bias: Array, offset: Array) -> Array:
    """lambda_i = c + sigmoid(w . q_i + b) for each head, at least 1e-6.

    q is detached; c is kept at or above 0 by a clamp that passes the gradient straight through.

    Args:
      query: (B, T, N, H).
      kernel: (N, H).
      bias: (N,).
      offset: (N,), c.
    """
    kernel, bias, offset = (x.astype(jnp.float32) for x in (kernel, bias, offset))
    logits = jnp.einsum("btnh,nh->btn", jax.lax.stop_gradient(query).astype(jnp.float32), kernel)
    offset = offset + jax.lax.stop_gradient(jnp.maximum(offset, 0.0) - offset)
    lam = offset[None, None] + jax.nn.sigmoid(logits + bias[None, None])
    return jnp.maximum(lam, LAMBDA_FLOOR)


def beta_of(log_beta: Array) -> Array:
    """exp(log_beta), within [0.01, 20]."""
    return jnp.clip(jnp.exp(log_beta.astype(jnp.float32)), *BETA_RANGE)


def gates_of(logits: Array) -> tuple[Array, Array]:
    """Gate logits (B, T, 2) or (B, T, N, 2) -> the two gates, (B, T, 1) or (B, T, N)."""
    gates = jax.nn.sigmoid(logits.astype(jnp.float32))
    if gates.ndim == 3:
        gates = gates[:, :, None]
    return gates[..., 0], gates[..., 1]


def dropout(x: Array, rng: Array, rate: float, broadcast: bool) -> Array:
    """Dropout on an output (B, T, N, H); with `broadcast`, one mask for all examples and heads."""
    shape = (1, x.shape[1], 1, x.shape[3]) if broadcast else x.shape
    keep = jnp.broadcast_to(jax.random.bernoulli(rng, 1.0 - rate, shape), x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def dropout_rngs(rng: Array, dropout_rate: float, spec: AttentionSpec) -> tuple[Array | None, Array | None]:
    """Keys for dropout on the output and for branch dropout; None where the rate is 0."""
    output_rng, branch_rng = jax.random.split(rng)
    return output_rng if dropout_rate else None, branch_rng if spec.branch_dropout_rate else None
