"""The decoder: a causal transformer over tokens that is read at its last positions."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from elsaa_jax import ElsaaConfig
from elsaa_jax.types import AttentionKind
from experiments.engine.transformer import Attention, ModelConfig, add_positions, blocks


class Decoder(nn.Module):
    """A causal pre-LN transformer over tokens, read at its last positions.

    Attributes:
      sizes: Sizes of the model.
      vocabulary: Number of different tokens.
      attention: Kind of the attention.
      config: Configuration of the attention.
    """

    sizes: ModelConfig
    vocabulary: int
    attention: AttentionKind = "elsaa"
    config: ElsaaConfig = ElsaaConfig()

    @nn.compact
    def __call__(self, tokens: jax.Array, num_outputs: int | None = None, deterministic: bool = True) -> jax.Array:
        """Computes the logits at the last positions.

        Args:
          tokens: Token ids, (B, S) int32.
          num_outputs: Number of last positions that are read. None reads all.
          deterministic: Whether dropout of outputs and of branches is off.

        Returns:
          Logits, (B, num_outputs, vocabulary) float32.
        """
        sizes, dtype = self.sizes, jnp.dtype(self.sizes.dtype)
        embed = nn.Embed(self.vocabulary, sizes.width, dtype=dtype, name="embed")
        x = add_positions(self, sizes, embed(tokens))
        attention = Attention(self.attention, self.config, is_causal=True)
        x = blocks(self, sizes, attention, x, num_outputs, deterministic)
        logits = embed.attend(x) if sizes.tie_head else nn.Dense(self.vocabulary, dtype=dtype, name="head")(x)
        return logits.astype(jnp.float32)


def init(model: Decoder, rng: jax.Array) -> dict[str, Any]:
    """Returns the variables of a model before training, "params" and "hashes"."""
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
    """Applies a model; in training mode if there is a random key for dropout."""
    rngs = {} if dropout_rng is None else {"dropout": dropout_rng}
    logits: Any = model.apply(variables, tokens, num_outputs, dropout_rng is None, rngs=rngs)
    return logits
