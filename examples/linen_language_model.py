"""Trains a small byte-level language model with ELSAA attention, in Flax linen.

    pip install -e ".[data]"
    python examples/linen_language_model.py

The text is this repository's own documentation. The run takes less than a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from elsaa_jax import ELSAA, ElsaaConfig, RaceConfig, SortLshConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = ElsaaConfig(
    race=RaceConfig(num_tables=4, num_bits=4, chunk_size=128),
    sparse=SortLshConfig(num_bits=8, block_size=32, min_length=64),
    short_conv=3,
)


class Model(nn.Module):
    """A causal pre-LN transformer over bytes. The short convolution gives it a sense of position.

    Attributes:
      width: Width of the residual stream.
      num_layers: Number of blocks.
    """

    width: int = 64
    num_layers: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits of the next byte at each position, (B, T, 256)."""
        x = nn.Embed(256, self.width)(tokens)
        for _ in range(self.num_layers):
            x = x + ELSAA(num_heads=4, is_causal=True, config=CONFIG)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(256)(nn.LayerNorm()(x))


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


def train(steps: int, length: int, batch_size: int) -> list[float]:
    """Trains, prints the loss in nats per byte, and returns the losses of all steps."""
    training, validation = read_text()
    rng = np.random.default_rng(0)
    model, optimizer = Model(), optax.adamw(3e-3)
    rngs = {"params": jax.random.key(0), "hashes": jax.random.key(1)}
    variables = model.init(rngs, sample(training, rng, 1, length)[:, :-1])
    params, hashes = variables["params"], variables["hashes"]  # The planes are not trained.
    state = optimizer.init(params)

    def loss_fn(params: dict, pieces: jax.Array) -> jax.Array:
        logits = model.apply({"params": params, "hashes": hashes}, pieces[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, pieces[:, 1:]))

    @jax.jit
    def train_step(params: dict, state: optax.OptState, pieces: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(loss_fn)(params, pieces)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for step in range(1, steps + 1):
        params, state, loss = train_step(params, state, sample(training, rng, batch_size, length))
        losses.append(float(loss))
        if step == 1 or step % 20 == 0 or step == steps:
            print(f"step {step:4d}  training loss {losses[-1]:.3f}", flush=True)
    held_out = float(jax.jit(loss_fn)(params, sample(validation, rng, batch_size, length)))
    print(f"validation loss {held_out:.3f} nats per byte, {held_out / np.log(2):.2f} bits")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a byte-level language model with ELSAA attention, in linen.")
    parser.add_argument("--steps", type=int, default=120, help="Number of training steps. Default: 120.")
    parser.add_argument("--length", type=int, default=512, help="Tokens of one training example. Default: 512.")
    parser.add_argument("--batch-size", type=int, default=4, help="Examples of one step. Default: 4.")
    arguments = parser.parse_args()
    train(arguments.steps, arguments.length, arguments.batch_size)
