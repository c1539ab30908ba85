"""The models of the experiments."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from elsaa_jax import ELSAA, ElsaaConfig
from elsaa_jax.config import check_choice, check_int, check_number
from elsaa_jax.types import AttentionKind

Positions = Literal["none", "learned", "rope"]
ROTARY_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a pre-LN transformer.

    Attributes:
      width: features of a token.
      num_layers: blocks of attention and MLP.
      num_heads: heads of each attention.
      mlp_width: hidden features of each MLP.
      positions: "none", "learned" (a table of `num_positions`, stretched by linear interpolation over longer inputs) or
        "rope".
      num_positions: rows of the table of learned positions.
      tie_head: whether the head is the transposed table of tokens.
      dropout_rate: on the outputs of attention and MLP.
      dtype: of the computation; parameters are float32.
    """

    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    mlp_width: int = 128
    positions: Positions = "none"
    num_positions: int = 1024
    tie_head: bool = False
    dropout_rate: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("width", "num_layers", "num_heads", "mlp_width", "num_positions"):
            check_int(f"ModelConfig.{name}", getattr(self, name), 1)
        if self.width % self.num_heads:
            raise ValueError(
                f"ModelConfig.width is {self.width}; it must be a multiple of num_heads = {self.num_heads}"
            )
        check_choice("ModelConfig.positions", self.positions, ("none", "learned", "rope"))
        check_choice("ModelConfig.dtype", self.dtype, ("float32", "bfloat16"))
        check_number("ModelConfig.dropout_rate", self.dropout_rate, 0.0, 1.0)


class Decoder(nn.Module):
    """A causal pre-LN transformer over tokens, read out at its last positions.

    Attributes:
      sizes: of the model.
      vocabulary: number of tokens.
      attention: which attention, by name.
      config: of the attention.
    """

    sizes: ModelConfig
    vocabulary: int
    attention: AttentionKind = "elsaa"
    config: ElsaaConfig = ElsaaConfig()

    @nn.compact
    def __call__(self, tokens: jax.Array, num_outputs: int | None = None, deterministic: bool = True) -> jax.Array:
        """Logits of the last tokens.

        Args:
          tokens: (B, S) int32.
          num_outputs: how many of the last positions are read, all where None. Only they query in the last layer, so
            that one costs next to nothing where few are read.
          deterministic: no dropout, neither of outputs nor of branches.

        Returns:
          (B, num_outputs, vocabulary) float32.
        """
        sizes, dtype = self.sizes, jnp.dtype(self.sizes.dtype)
        num_outputs = tokens.shape[1] if num_outputs is None else num_outputs
        config = self.config
        if sizes.positions == "rope":
            config = dataclasses.replace(config, rotary_base=ROTARY_BASE)
        embed = nn.Embed(self.vocabulary, sizes.width, dtype=dtype, name="embed")
        drop = nn.Dropout(sizes.dropout_rate, deterministic=deterministic)
        x = embed(tokens)
        if sizes.positions == "learned":
            table = self.param("positions", nn.initializers.normal(0.02), (sizes.num_positions, sizes.width))
            x = x + stretch(table, tokens.shape[1]).astype(dtype)[None]
        for layer in range(sizes.num_layers):
            last = layer == sizes.num_layers - 1
            keys = nn.LayerNorm(dtype=dtype, name=f"attention_norm_{layer}")(x)
            first = x.shape[1] - num_outputs if last else 0
            attention = ELSAA(
                sizes.num_heads,
                dtype=dtype,
                is_causal=True,
                attention=self.attention,
                config=config,
                deterministic=deterministic,
                name=f"attention_{layer}",
            )
            x = x[:, first:] + drop(attention(keys[:, first:], keys))
            hidden = nn.LayerNorm(dtype=dtype, name=f"mlp_norm_{layer}")(x)
            hidden = nn.gelu(nn.Dense(sizes.mlp_width, dtype=dtype, name=f"mlp_in_{layer}")(hidden))
            x = x + drop(nn.Dense(sizes.width, dtype=dtype, name=f"mlp_out_{layer}")(hidden))
        x = nn.LayerNorm(dtype=dtype, name="norm")(x)
        logits = embed.attend(x) if sizes.tie_head else nn.Dense(self.vocabulary, dtype=dtype, name="head")(x)
        return logits.astype(jnp.float32)


def stretch(table: Any, length: int) -> jax.Array:
    """(P, width) -> (length, width): its first rows, or where it is too short, all of it by linear interpolation."""
    rows = table.shape[0]
    if length <= rows:
        return table[:length]
    places = jnp.linspace(0.0, rows - 1.0, length)
    low = jnp.minimum(places.astype(jnp.int32), rows - 2) if rows > 1 else jnp.zeros(length, jnp.int32)
    share = (places - low.astype(jnp.float32))[:, None]
    return table[low] * (1 - share) + table[jnp.minimum(low + 1, rows - 1)] * share


def init(model: Decoder, rng: jax.Array) -> dict[str, Any]:
    """The variables of a model before training, "params" and "hashes"."""
    params_rng, hashes_rng = jax.random.split(rng)
    return dict(model.init({"params": params_rng, "hashes": hashes_rng}, jnp.zeros((1, 8), jnp.int32), 1))


def apply(
    model: Decoder,
    variables: dict[str, Any],
    tokens: jax.Array,
    num_outputs: int | None = None,
    *,
    dropout_rng: jax.Array | None = None,
) -> jax.Array:
    """`Decoder.__call__`, in training where there is a key for dropout."""
    rngs = {} if dropout_rng is None else {"dropout": dropout_rng}
    logits: Any = model.apply(variables, tokens, num_outputs, dropout_rng is None, rngs=rngs)
    return logits
