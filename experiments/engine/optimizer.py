"""The optimiser: AdamW on clipped gradients, with warm-up and decay of the learning rate."""

from __future__ import annotations

import optax

from experiments.engine.config import TrainConfig


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Returns the schedule: linear from peak / (w + 1) to the peak at step w, then the decay to the last step."""
    warmup = min(config.warmup_steps, config.total_steps // 2)
    rest, peak = config.total_steps - warmup, config.learning_rate
    if config.decay == "cosine":
        decay = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    else:
        decay = optax.linear_schedule(peak, config.final_fraction * peak, rest)
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, max(1, warmup)), decay], [warmup])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW on gradients whose global norm is clipped."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(learning_rate(config), b1=config.b1, b2=config.b2, weight_decay=config.weight_decay),
    )
