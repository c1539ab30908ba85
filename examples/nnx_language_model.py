"""Trains a small byte-level language model with ELSAA attention, in Flax nnx.

    pip install -e ".[data]"
    python examples/nnx_language_model.py

The text is this repository's own documentation. The run takes less than a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from elsaa_jax import ElsaaConfig, RaceConfig, SortLshConfig
from elsaa_jax.nnx import ELSAA

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = ElsaaConfig(
    race=RaceConfig(num_tables=4, num_bits=4, chunk_size=128),
    sparse=SortLshConfig(num_bits=8, block_size=32, min_length=64),
    short_conv=3,
)


class Block(nnx.Module):
    """One pre-LN block: attention, then an MLP, each with a residual connection."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = ELSAA(num_heads=4, in_features=width, is_causal=True, config=CONFIG, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.wide = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the residual stream after the block, (B, T, width)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(nnx.gelu(self.wide(self.mlp_norm(x))))


class Model(nnx.Module):
    """A causal transformer over bytes. The short convolution gives it a sense of position."""

    def __init__(self, width: int = 64, num_layers: int = 2, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits of the next byte at each position, (B, T, 256)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of the README and the documentation: nine tenths to train on, the rest to validate."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    data = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
    split = len(data) * 9 // 10
    return data[:split], data[split:]


def sample(data: np.ndarray, rng: np.random.Generator, batch_size: int, length: int) -> np.ndarray:
    """Returns random pieces of the text, (batch_size, length + 1): inputs, and targets one place later."""
    starts = rng.integers(0, len(data) - length, batch_size)
    return np.stack([data[start : start + length + 1] for start in starts])


def loss_fn(model: Model, pieces: jax.Array) -> jax.Array:
    """Returns the mean loss of the next byte, in nats."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(pieces[:, :-1]), pieces[:, 1:]))


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, pieces: jax.Array) -> jax.Array:
    """Updates the model once, and returns the loss before the update."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, pieces)
    optimizer.update(model, grads)
    return loss


def train(steps: int, length: int, batch_size: int) -> list[float]:
    """Trains, prints the loss in nats per byte, and returns the losses of all steps."""
    training, validation = read_text()
    rng, model = np.random.default_rng(0), Model(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)  # HashPlanes are not trained.
    losses = []
    for step in range(1, steps + 1):
        losses.append(float(train_step(model, optimizer, sample(training, rng, batch_size, length))))
        if step == 1 or step % 20 == 0 or step == steps:
            print(f"step {step:4d}  training loss {losses[-1]:.3f}", flush=True)
    held_out = float(nnx.jit(loss_fn)(model, sample(validation, rng, batch_size, length)))
    print(f"validation loss {held_out:.3f} nats per byte, {held_out / np.log(2):.2f} bits")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a byte-level language model with ELSAA attention, in nnx.")
    parser.add_argument("--steps", type=int, default=120, help="Number of training steps. Default: 120.")
    parser.add_argument("--length", type=int, default=512, help="Tokens of one training example. Default: 512.")
    parser.add_argument("--batch-size", type=int, default=4, help="Examples of one step. Default: 4.")
    arguments = parser.parse_args()
    train(arguments.steps, arguments.length, arguments.batch_size)
