"""Inputs of the linen and the nnx layer: masks, short convolution, rotary positions and dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from elsaa_jax.layers.spec import AttentionSpec
from elsaa_jax.types import Array, DType


class Inputs(NamedTuple):
    """The arguments of a layer's call, in the form that both layers use.

    Attributes:
      query: Inputs of the queries, (B, T, features).
      key: Inputs of the keys, (B, S, features).
      value: Inputs of the values, (B, S, features).
      query_mask: Queries that take part, (B, T) bool, or None. In self-attention it is the mask of the keys.
      key_mask: Keys that take part, (B, S) bool, or None.
      lead: Batch axes of the inputs. B is their product.
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
        """Fills in the arguments that were left out, and folds the batch axes into one."""
        if inputs_k is None and inputs_v is not None:
            _check_array("inputs_v", inputs_v)
            raise ValueError(
                f"inputs_v has shape {inputs_v.shape} and inputs_k is None; give inputs_k, and leave out inputs_v "
                "where it is the same"
            )
        is_self = inputs_k is None or inputs_k is inputs_q
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        for name, x in (("inputs_q", inputs_q), ("inputs_k", inputs_k), ("inputs_v", inputs_v)):
            _check_array(name, x)
            if jnp.ndim(x) < 2 or jnp.shape(x)[:-2] != jnp.shape(inputs_q)[:-2]:
                raise ValueError(
                    f"{name} has shape {jnp.shape(x)}; it must be (..., length, features) with the batch axes of "
                    f"inputs_q, {jnp.shape(inputs_q)[:-2]}"
                )
            if 0 in x.shape:
                raise ValueError(f"{name} has shape {x.shape}; it must have no empty axis")
        lead = inputs_q.shape[:-2]
        key_mask = key_mask_of("mask", mask, lead, inputs_q.shape[-2], inputs_k.shape[-2])
        if query_mask is None:
            query_mask = key_mask if is_self else None
        else:
            query_mask = key_mask_of("query_mask", query_mask, lead, inputs_q.shape[-2], inputs_q.shape[-2])
        query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (inputs_q, inputs_k, inputs_v))
        return cls(query, key, value, query_mask, key_mask, lead)

    def convolution_mask(self, is_causal: bool) -> Array | None:
        """Returns the mask of the queries in their short convolution: causal queries are the last T positions."""
        if is_causal and self.query_mask is None and self.key_mask is not None:
            return self.key_mask[:, -self.query.shape[1] :]
        return self.query_mask


def _check_array(name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name} is a {type(x).__name__}; it must be an array: use jnp.asarray")


def key_mask_of(name: str, mask: Array | None, lead: tuple[int, ...], num_queries: int, num_keys: int) -> Array | None:
    """Turns a mask of Flax, (..., S) or (..., 1, 1, S), into (B, S) bool.

    Args:
      name: Name of the argument.
      mask: Mask in which True or nonzero means "attend", or None.
      lead: Batch axes of the inputs; those of the mask may be 1.
      num_queries: T.
      num_keys: S.
    """
    if mask is None:
        return None
    _check_array(name, mask)
    shape = jnp.shape(mask)
    fits = len(shape) in (len(lead) + 1, len(lead) + 3) and shape[-1] == num_keys
    fits = fits and all(a in (1, b) for a, b in zip(shape, lead, strict=False))
    fits = fits and all(a == 1 for a in shape[len(lead) : -1])
    if not fits:
        raise ValueError(
            f"{name} has shape {shape}; for {num_queries} queries and {num_keys} keys it must be "
            f"{(*lead, num_keys)} or {(*lead, 1, 1, num_keys)}, as a key_mask. A mask over pairs of tokens would be "
            "of quadratic size: use is_causal=True for a causal mask"
        )
    mask = jnp.asarray(mask).astype(bool).reshape(*shape[: len(lead)], num_keys)
    return jnp.broadcast_to(mask, (*lead, num_keys)).reshape(-1, num_keys)


class Parameter(NamedTuple):
    """Shape and initial value of a parameter.

    Attributes:
      init: Function of a key, a shape and a dtype that returns the initial value.
      shape: Shape.
    """

    init: Callable[[Array, tuple[int, ...], DType], Array]
    shape: tuple[int, ...]


def convolution_parameters(spec: AttentionSpec) -> dict[str, Parameter]:
    """Returns the taps of the short convolutions by name, (taps, heads, H) each; empty without convolutions."""
    taps = spec.config.short_conv
    if not taps:
        return {}
    heads = {"query_conv": spec.num_heads, "key_conv": spec.num_kv_heads, "value_conv": spec.num_kv_heads}
    return {name: Parameter(_random_taps, (taps, number, spec.head_dim)) for name, number in heads.items()}


def convolve_and_rotate(
    spec: AttentionSpec,
    call: Inputs,
    query: Array,
    key: Array,
    value: Array,
    taps: Sequence[Array],
    project_query: Callable[[Array], Array],
) -> tuple[Array, Array, Array]:
    """Applies the short convolutions and the rotary positions that the config asks for.

    Args:
      spec: Attention of the layer.
      call: Inputs of the layer.
      query: Projected queries, (B, T, N, H).
      key: Projected keys, (B, S, K, H).
      value: Projected values, (B, S, K, H).
      taps: Taps of the convolutions of query, key and value; empty without convolutions.
      project_query: Projection of the queries, for the tokens before the first query.
    """
    if taps:
        history = query_history(spec, call, project_query)
        query = short_convolution(query, taps[0], call.convolution_mask(spec.is_causal), history)
        key = short_convolution(key, taps[1], call.key_mask)
        value = short_convolution(value, taps[2], call.key_mask)
    return *rotate(spec, query, key), value


def short_convolution(x: Array, kernel: Array, mask: Array | None, history: Array | None = None) -> Array:
    """Computes a depthwise causal convolution over tokens: y_t = sum_j kernel_j x_{t-j}.

    Args:
      x: Tokens, (B, tokens, heads, H).
      kernel: Taps, (taps, heads, H). Tap 0 is for the token itself.
      mask: Tokens that take part, (B, tokens) bool, or None. Masked tokens count as 0.
      history: Tokens before the first, (B, up to taps - 1, heads, H), or None if there are none.
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
    """Sets masked tokens of (B, tokens, heads, H) to 0."""
    return x if mask is None else jnp.where(mask[:, :, None, None], x, 0)


def query_history(spec: AttentionSpec, call: Inputs, project: Callable[[Array], Array]) -> Array | None:
    """Returns the queries before the first one that its short convolution reads, 0 where masked; None without any.

    Causal queries are the last T of S positions, so the inputs before them are those of the keys.

    Args:
      spec: Attention of the layer.
      call: Inputs of the layer.
      project: Projection of inputs (B, tokens, features) to queries (B, tokens, N, H).
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
    """Applies rotary positions to q and k if the config asks for them: x_i and x_{i + H/2} are rotated as one pair.

    Args:
      spec: Attention of the layer. Causal queries are the last T of S positions, others the first T.
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
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


def dropout(x: Array, rng: Array, rate: float, broadcast: bool) -> Array:
    """Applies dropout to an output (B, T, N, H); with `broadcast`, one mask serves all examples and heads."""
    shape = (1, x.shape[1], 1, x.shape[3]) if broadcast else x.shape
    keep = jnp.broadcast_to(jax.random.bernoulli(rng, 1.0 - rate, shape), x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def _random_taps(rng: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    """Draws the taps of a short convolution: normal, of variance 1 / taps, so that tokens mix and keep their scale."""
    return jax.random.normal(rng, shape, dtype) * shape[0] ** -0.5
