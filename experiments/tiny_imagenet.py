"""Tiny ImageNet: causal attention over 1,024 patches in raster order.

Claim: causal ELSAA is as good as causal exact attention and causal RACE at 1,024 tokens.

Command: python -m experiments.tiny_imagenet --attention elsaa,exact

A patch sees only the patches before it, so the class is read at the last patch: a class token in front would see
nothing. Results: docs/results/paper.md.
"""

from __future__ import annotations

from elsaa_jax import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from experiments.engine import cli
from experiments.engine.classifier import ClassifierConfig
from experiments.engine.data.examples import ImageData
from experiments.engine.presets import PAPER_DROPOUT, Preset, cpu_optimizer, paper_attention, paper_optimizer
from experiments.engine.suite import Experiment, Presets

TASK = "tiny_imagenet"
CLASSES = 200
LENGTH = 1024
# The appendix does not say how these images are augmented. They are flipped, as in the authors' code.
DATA = ImageData("tiny_imagenet", CLASSES, size=64, patch_size=2, augmentation="padded_crop", padding=0)

PRESETS: Presets = {
    "paper": Preset(
        sizes=ClassifierConfig(
            width=256,
            num_layers=4,
            num_heads=4,
            mlp_width=1024,
            positions="learned",
            num_positions=LENGTH,
            dropout_rate=PAPER_DROPOUT,
            readout="last",
            patch_size=2,
            is_causal=True,
        ),
        config=paper_attention(bits=2, tables=5, ensembles=1, lsh_bits=4, block=32, min_length=256, gate=128, chunk=64),
        data=DATA,
        optimizer=paper_optimizer(3e-4, weight_decay=0.05),
        batch_size=128,
        epochs=50,
        warmup=0.05,
    ),
    "cpu": Preset(
        sizes=ClassifierConfig(
            width=48,
            num_layers=2,
            num_heads=2,
            mlp_width=96,
            positions="learned",
            num_positions=LENGTH,
            readout="last",
            patch_size=2,
            patch_margin=3,
            grid_positions=True,
            is_causal=True,
        ),
        config=ElsaaConfig(
            race=RaceConfig(num_tables=5, num_bits=2, chunk_size=128),
            sparse=SortLshConfig(num_bits=4, block_size=32, min_length=128),
            fusion=FusionConfig(gate_hidden=16),
        ),
        data=ImageData("tiny_imagenet", CLASSES, size=64, patch_size=2, area=(0.5, 1.0)),
        optimizer=cpu_optimizer(3e-3, weight_decay=0.05),
        batch_size=16,
        steps=700,
    ),
}


EXPERIMENT = Experiment(TASK, "Tiny ImageNet: causal attention over patches in raster order.", PRESETS)
make_parser, run = EXPERIMENT.make_parser, EXPERIMENT.run

if __name__ == "__main__":
    cli.main(EXPERIMENT.main)
