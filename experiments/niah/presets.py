"""Presets of needle in a haystack: attention, model and training, for a CPU and as in the paper."""

from __future__ import annotations

from typing import Literal, NamedTuple

from elsaa_jax import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from experiments.engine.config import TrainConfig
from experiments.engine.transformer import ModelConfig
from experiments.niah.task import NiahStage

PresetName = Literal["default", "paper"]


class Preset(NamedTuple):
    """Settings of a model and of its training.

    Attributes:
      config: Configuration of the attention, before a method changes it.
      sizes: Sizes of the model.
      train: Settings of the training.
    """

    config: ElsaaConfig
    sizes: ModelConfig
    train: TrainConfig


PRESETS: dict[PresetName, Preset] = {
    "default": Preset(
        config=ElsaaConfig(
            race=RaceConfig(num_tables=4, num_bits=4, chunk_size=128),
            sparse=SortLshConfig(num_bits=12, block_size=64, min_length=256),
            fusion=FusionConfig(branch_dropout_rate=0.5),
            share_planes=True,
            short_conv=3,
        ),
        sizes=ModelConfig(),
        train=TrainConfig(
            stages=(
                NiahStage(300, 64, 32, needles=8, queries=8),
                NiahStage(250, 256, 16, needles=16, queries=16),
                NiahStage(50, 1024, 8, needles=8, queries=8),
            ),
            learning_rate=6e-3,
        ),
    ),
    "paper": Preset(
        config=ElsaaConfig(
            race=RaceConfig(num_tables=4, num_bits=4, chunk_size=64),
            sparse=SortLshConfig(num_bits=5, block_size=64, min_length=256, pairing="rank"),
            fusion=FusionConfig(gate_hidden=128),
            share_planes=False,
        ),
        sizes=ModelConfig(
            width=256,
            num_layers=4,
            num_heads=4,
            mlp_width=1024,
            positions="learned",
            num_positions=1025,
            tie_head=True,
            dropout_rate=0.1,
        ),
        train=TrainConfig(
            stages=(NiahStage(5880, 1024, 1024),),
            learning_rate=3e-4,
            warmup_steps=118,
            decay="linear",
            final_fraction=0.0,
            b2=0.999,
        ),
    ),
}
