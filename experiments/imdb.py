"""IMDB: whether a review of 512 tokens is positive.

Claim: at short lengths ELSAA, its branches and exact attention are within a few points of each other.

Command: python -m experiments.imdb --attention elsaa,exact

Reviews of 512 to 1,024 tokens are kept, longer reviews are cut into pieces, and shorter reviews of one class are
joined. Training and test reviews are never mixed. Results: docs/results/paper.md.
"""

from __future__ import annotations

from elsaa_jax import ElsaaConfig, RaceConfig, SortLshConfig
from experiments.engine import cli
from experiments.engine.classifier import ClassifierConfig
from experiments.engine.data.examples import ReviewData
from experiments.engine.presets import PAPER_DROPOUT, Preset, cpu_optimizer, paper_attention, paper_optimizer
from experiments.engine.suite import Experiment, Presets

TASK = "imdb"
LENGTH = 512

PRESETS: Presets = {
    "paper": Preset(
        sizes=ClassifierConfig(
            width=128,
            num_layers=1,
            num_heads=2,
            mlp_width=512,
            positions="learned",
            num_positions=LENGTH,
            dropout_rate=PAPER_DROPOUT,
        ),
        config=paper_attention(bits=3, tables=2, ensembles=2, lsh_bits=5, block=32, min_length=256, gate=64),
        data=ReviewData(LENGTH, vocabulary=50_000),
        optimizer=paper_optimizer(1e-5, weight_decay=5e-5, final_fraction=1.0),
        batch_size=32,
        epochs=150,
        warmup=0.0,
    ),
    "cpu": Preset(
        sizes=ClassifierConfig(width=64, num_layers=1, num_heads=2, mlp_width=128, dropout_rate=0.1),
        config=ElsaaConfig(race=RaceConfig(num_tables=2, num_bits=3), sparse=SortLshConfig(num_bits=5, block_size=32)),
        data=ReviewData(LENGTH, vocabulary=20_000),
        optimizer=cpu_optimizer(2e-3, weight_decay=0.1),
        batch_size=32,
        steps=300,
    ),
}


EXPERIMENT = Experiment(TASK, "IMDB: the sentiment of reviews of 512 tokens.", PRESETS)
make_parser, run = EXPERIMENT.make_parser, EXPERIMENT.run

if __name__ == "__main__":
    cli.main(EXPERIMENT.main)
