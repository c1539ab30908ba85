"""Parameters of beta and lambda, and the values that a layer learns, the same for linen and nnx."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.config import BETA_RANGE
from elsaa_jax.layers.inputs import Parameter
from elsaa_jax.layers.spec import AttentionSpec
from elsaa_jax.types import Array, DType

LAMBDA_OFFSET = 0.3  # c of c + sigmoid(w . q + b), which starts at 0.8
LAMBDA_FLOOR = 1e-6
LAMBDA_KERNEL_STDDEV = 1e-3


def fusion_parameters(spec: AttentionSpec) -> dict[str, Parameter]:
    """Returns the parameters of beta and lambda by name."""
    config, parameters = spec.config, {}
    if spec.learns_beta:
        parameters["log_beta"] = Parameter(_constant(math.log(config.race.beta)), ())
    if spec.lambda_kind == "scalar":
        parameters["log_lambda"] = Parameter(_constant(math.log(config.fusion.lambda_init)), ())
    if spec.lambda_kind == "query":
        heads = (spec.num_heads,)
        parameters["lambda_kernel"] = Parameter(_small_normal, (*heads, spec.head_dim))
        parameters["lambda_bias"] = Parameter(_constant(0.0), heads)
        parameters["lambda_offset"] = Parameter(_constant(LAMBDA_OFFSET), heads)
    return parameters


class FusionValues(NamedTuple):
    """Values of a call that a layer learns.

    Attributes:
      beta: Sharpness of the soft codes.
      lam: Lambda, broadcasts to (B, T, N).
      gates: Gates of the sparse and the low-rank branch, broadcast to (B, T, N).
    """

    beta: float | Array
    lam: float | Array
    gates: tuple[float | Array, float | Array]


def fusion_values(
    spec: AttentionSpec, parameters: Mapping[str, Array], gate_logits: Array | None, query: Array
) -> FusionValues:
    """Computes beta, lambda and the gates of a call.

    Args:
      spec: Attention of the layer.
      parameters: Values of the `fusion_parameters`.
      gate_logits: Logits of the gates, (B, T, 2) or (B, T, N, 2), or None without gates.
      query: Queries, (B, T, N, H).
    """
    beta: float | Array = spec.config.race.beta
    if spec.learns_beta:
        beta = jnp.clip(jnp.exp(parameters["log_beta"].astype(jnp.float32)), *BETA_RANGE)
    lam: float | Array = spec.config.fusion.lambda_init
    if spec.lambda_kind == "scalar":
        lam = jnp.exp(parameters["log_lambda"].astype(jnp.float32))
    if spec.lambda_kind == "query":
        kernel, bias, offset = (parameters[f"lambda_{name}"] for name in ("kernel", "bias", "offset"))
        lam = query_lambda(query, kernel, bias, offset)
    if gate_logits is None:
        return FusionValues(beta, lam, (1.0, 1.0))
    gates = jax.nn.sigmoid(gate_logits.astype(jnp.float32))
    if gates.ndim == 3:
        gates = gates[:, :, None]
    return FusionValues(beta, lam, (gates[..., 0], gates[..., 1]))


def query_lambda(query: Array, kernel: Array, bias: Array, offset: Array) -> Array:
    """Computes lambda_i = c + sigmoid(w . q_i + b) for each head, at least 1e-6.

    q is detached. c is kept at or above 0 by a clamp that passes the gradient straight through.

    Args:
      query: Queries, (B, T, N, H).
      kernel: Weights w, (N, H).
      bias: Biases b, (N,).
      offset: Offsets c, (N,).
    """
    kernel, bias, offset = (x.astype(jnp.float32) for x in (kernel, bias, offset))
    logits = jnp.einsum("btnh,nh->btn", lax.stop_gradient(query).astype(jnp.float32), kernel)
    offset = offset + lax.stop_gradient(jnp.maximum(offset, 0.0) - offset)
    lam = offset[None, None] + jax.nn.sigmoid(logits + bias[None, None])
    return jnp.maximum(lam, LAMBDA_FLOOR)


def _constant(value: float) -> Callable[[Array, tuple[int, ...], DType], Array]:
    return lambda rng, shape, dtype: jnp.full(shape, value, dtype)


def _small_normal(rng: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    return jax.random.normal(rng, shape, dtype) * LAMBDA_KERNEL_STDDEV
