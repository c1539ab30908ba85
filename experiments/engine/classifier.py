"""The classifier: a transformer over tokens or over the patches of an image, with one answer per input."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from elsaa_jax import ElsaaConfig
from elsaa_jax.checks import check_bool, check_choice, check_int
from elsaa_jax.types import AttentionKind
from experiments.engine.transformer import NORMAL, Attention, ModelConfig, add_positions, blocks

Readout = Literal["class", "first", "mean", "max", "last", "halves"]
READOUTS = get_args(Readout)
SLOWEST_WAVE = 100.0  # number of patches per radian of the slowest wave
SOWN = ("multiplier", "lam", "gate_sparse", "gate_low_rank", "sparse_log_mass", "low_rank_log_mass", "log_mass")


@dataclasses.dataclass(frozen=True)
class ClassifierConfig(ModelConfig):
    """Sizes of a classifier.

    Attributes:
      readout: Features from which the class is read: a learned "class" token in front of the input, the "first" or the
        "last" token, the "mean" or the "max" over tokens, or the distance between the means of both "halves".
      patch_size: Side of a patch in pixels, if the input is an image.
      patch_margin: Number of pixels around a patch that its token also sees. With 0, patches do not overlap.
      grid_positions: Whether the learned positions of patches are initialised as waves over rows and columns, so that
        neighbours are similar. False initialises them at random.
      qkv_bias: Whether the projections of attention have biases.
      is_causal: Whether the attention is causal.
    """

    readout: Readout = "mean"
    patch_size: int = 1
    patch_margin: int = 0
    grid_positions: bool = False
    qkv_bias: bool = False
    is_causal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("ClassifierConfig.readout", self.readout, READOUTS)
        check_int("ClassifierConfig.patch_size", self.patch_size, 1)
        check_int("ClassifierConfig.patch_margin", self.patch_margin, 0)
        check_bool("ClassifierConfig.grid_positions", self.grid_positions)
        if self.grid_positions and (self.positions != "learned" or self.width % 4):
            raise ValueError(
                f"ClassifierConfig.grid_positions is True with positions = {self.positions!r} and width = {self.width}"
                "; it needs learned positions and a width that is a multiple of 4"
            )
        check_bool("ClassifierConfig.qkv_bias", self.qkv_bias)
        check_bool("ClassifierConfig.is_causal", self.is_causal)
        if self.is_causal and self.readout in ("class", "first"):
            raise ValueError(
                f"ClassifierConfig.readout is {self.readout!r}, and a causal model sees nothing there; use 'last' or "
                "'mean'"
            )


class Classifier(nn.Module):
    """A pre-LN transformer that gives one answer per input.

    Attributes:
      sizes: Sizes of the model.
      num_classes: Number of classes.
      vocabulary: Number of different tokens, if the input is tokens.
      attention: Kind of the attention.
      config: Configuration of the attention.
    """

    sizes: ClassifierConfig
    num_classes: int
    vocabulary: int = 1
    attention: AttentionKind = "elsaa"
    config: ElsaaConfig = ElsaaConfig()

    @nn.compact
    def __call__(self, inputs: jax.Array, deterministic: bool = True, sow_weights: bool = False) -> jax.Array:
        """Computes the logits of the classes.

        Args:
          inputs: Token ids, (B, S) int32, or images, (B, height, width, channels) float32.
          deterministic: Whether dropout of outputs and of branches is off.
          sow_weights: Whether gates, lambda, multiplier and masses are stored in "intermediates".

        Returns:
          Logits, (B, num_classes) float32.
        """
        sizes, dtype = self.sizes, jnp.dtype(self.sizes.dtype)
        if inputs.ndim == 2:
            x = nn.Embed(self.vocabulary, sizes.width, dtype=dtype, name="embed")(inputs)
        else:
            x = self._patches(inputs.astype(dtype))
        if sizes.readout == "class":
            token = self.param("class_token", nn.initializers.normal(0.02), (sizes.width,)).astype(dtype)
            x = jnp.concatenate([jnp.broadcast_to(token[None, None], (x.shape[0], 1, sizes.width)), x], axis=1)
        start = grid_start if sizes.grid_positions else NORMAL
        x = nn.Dropout(sizes.dropout_rate, deterministic=deterministic)(add_positions(self, sizes, x, start))
        attention = Attention(self.attention, self.config, sizes.is_causal, sizes.qkv_bias, sow_weights)
        num_outputs = 1 if sizes.is_causal and sizes.readout == "last" else None
        first_alone = sizes.readout in ("class", "first")
        x = blocks(self, sizes, attention, x, num_outputs, deterministic, first_alone=first_alone)
        x = _read(sizes.readout, x)
        return nn.Dense(self.num_classes, dtype=dtype, name="head")(x).astype(jnp.float32)

    def _patches(self, images: jax.Array) -> jax.Array:
        """Projects patches in raster order, (B, height, width, channels) -> (B, patches, width)."""
        size, margin = self.sizes.patch_size, self.sizes.patch_margin
        side = size + 2 * margin
        project = nn.Conv(
            self.sizes.width, (side, side), (size, size), padding=margin, dtype=images.dtype, name="patches"
        )
        x = project(images)
        return x.reshape(x.shape[0], -1, x.shape[-1])


def grid_start(rng: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Initialises a table of positions (rows, width) with sines and cosines over the rows and columns of a square.

    The position of a class token, in front of the square, is 0.
    """
    del rng
    rows, width = shape
    side = math.isqrt(rows)
    rates = SLOWEST_WAVE ** (-np.arange(width // 4) / max(1, width // 4 - 1))
    angles = np.arange(side)[:, None] * rates[None]
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    grid = np.concatenate([np.repeat(waves, side, axis=0), np.tile(waves, (side, 1))], axis=1)
    return jnp.asarray(np.pad(grid, ((rows - side * side, 0), (0, 0))), dtype)


def _read(readout: Readout, x: jax.Array) -> jax.Array:
    """Reads the features of the answer, (B, S, width) -> (B, features)."""
    if readout == "mean":
        return jnp.mean(x, axis=1)
    if readout == "max":
        return jnp.max(x, axis=1)
    if readout == "halves":
        half = x.shape[1] // 2
        distance = jnp.abs(jnp.mean(x[:, :half], axis=1) - jnp.mean(x[:, half:], axis=1))
        return distance * math.sqrt(half)  # Means of `half` random tokens differ by about 1 / sqrt(half).
    return x[:, -1 if readout == "last" else 0]


def init(model: Classifier, rng: jax.Array, inputs: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Returns the variables of a model before training, "params" and "hashes"; `inputs` is the shape of an example."""
    params_rng, hashes_rng = jax.random.split(rng)
    zeros = jnp.zeros((1, *inputs.shape), inputs.dtype)
    return dict(model.init({"params": params_rng, "hashes": hashes_rng}, zeros))


def apply_training(
    model: Classifier, variables: dict[str, Any], inputs: jax.Array, rng: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the logits in training mode, and the means of the values that layers sow, as `layer_0/multiplier`."""
    logits, state = model.apply(variables, inputs, False, True, rngs={"dropout": rng}, mutable=["intermediates"])
    means: dict[str, jax.Array] = {}
    for layer in range(model.sizes.num_layers):
        sown: Any = state["intermediates"].get(f"attention_{layer}", {})
        means |= {f"layer_{layer}/{name}": jnp.mean(sown[name][0]) for name in SOWN if name in sown}
    return logits, means


def layer_means(record: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the means of sown values in a line of metrics: a list over layers, by name."""
    found: dict[str, list[float]] = {}
    for name in SOWN:
        while (key := f"layer_{len(found.get(name, []))}/{name}") in record:
            found.setdefault(name, []).append(record[key])
    return found
