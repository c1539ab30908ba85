"""Presets of the classification experiments: model, attention, data and training budget of a task."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from elsaa_jax import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from elsaa_jax.types import AttentionKind
from experiments.engine.classifier import ClassifierConfig
from experiments.engine.config import OptimizerConfig

PresetName = Literal["paper", "cpu"]

COMPARED: tuple[AttentionKind, ...] = ("elsaa", "race", "sort_lsh", "sort_lsh_race", "exact")  # the paper's tables

# Settings of the paper that all its tasks share.
PAPER_DROPOUT = 0.1
PAPER_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings of a task, except its attention, its seed and the names of its runs.

    Attributes:
      sizes: Sizes of the model.
      config: Configuration of the attention.
      data: Examples of the task.
      optimizer: Settings of AdamW and of its learning rate.
      batch_size: Number of examples per microbatch.
      accumulate: Number of microbatches per step.
      epochs: Number of passes over the training examples, None if `steps` is given.
      steps: Number of training steps, None if `epochs` is given.
      warmup: Share of the steps that warm up the learning rate.
      label_smoothing: Label smoothing of the loss.
      checkpoint_every: Number of steps between checkpoints.
    """

    sizes: ClassifierConfig
    config: ElsaaConfig
    data: Any
    optimizer: OptimizerConfig
    batch_size: int
    accumulate: int = 1
    epochs: int | None = None
    steps: int | None = None
    warmup: float = 0.1
    label_smoothing: float = 0.0
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"Preset.epochs is {self.epochs} and steps is {self.steps}; give one of them")


def paper_optimizer(learning_rate: float, weight_decay: float, final_fraction: float = 0.0) -> OptimizerConfig:
    """Returns the optimiser of the paper's presets, with a linear decay."""
    return OptimizerConfig(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        final_fraction=final_fraction,
        decay="linear",
        b2=0.999,
    )


def cpu_optimizer(learning_rate: float, weight_decay: float) -> OptimizerConfig:
    """Returns an optimiser for a few hundred steps: cosine decay, and a short memory of squared gradients."""
    return OptimizerConfig(
        learning_rate=learning_rate, weight_decay=weight_decay, final_fraction=0.0, decay="cosine", b2=0.98
    )


def paper_attention(
    *, bits: int, tables: int, ensembles: int, lsh_bits: int, block: int, min_length: int, gate: int, chunk: int = 256
) -> ElsaaConfig:
    """Returns an attention with the settings of the paper's appendix."""
    return ElsaaConfig(
        race=RaceConfig(num_tables=tables, num_bits=bits, num_ensembles=ensembles, chunk_size=chunk),
        sparse=SortLshConfig(num_bits=lsh_bits, block_size=block, min_length=min_length, num_neighbors=0),
        fusion=FusionConfig(gate_hidden=gate, eps=PAPER_EPS),
        share_planes=False,
    )
