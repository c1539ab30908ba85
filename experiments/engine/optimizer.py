"""The optimiser: AdamW behind a clipped gradient, with warm-up and a cosine."""

from __future__ import annotations

import optax

from experiments.engine.config import TrainConfig


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """The rate after a number of steps: linear from peak / (w + 1) to the peak at step w, then a cosine to the end."""
    warmup = min(config.warmup_steps, config.total_steps // 2)
    peak = config.learning_rate
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=config.total_steps,
        end_value=config.final_fraction * peak,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clips the global norm of the gradient, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(learning_rate(config), b1=config.b1, b2=config.b2, weight_decay=config.weight_decay),
    )
