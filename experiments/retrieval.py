"""Text retrieval: whether two long texts of ArXiv papers are from the same archive.

Claim: at 64,000 tokens ELSAA and RACE learn the task, and exact attention does not.

Command: python -m experiments.retrieval --attention elsaa,exact

An input is `[CLS] a [SEP] b`, with 64,000 tokens in the preset "paper" and 1,024 in the preset "cpu"; a and b have no
paper in common. The paper's preset reads the answer at [CLS]. The CPU's preset reads it from the distance between the
means of both halves, which is learned in fewer steps. Results: docs/results/paper.md.
"""

from __future__ import annotations

import dataclasses

from experiments.arxiv import CPU_CONFIG, CPU_VOCABULARY, PAPER_CONFIG, VOCABULARY
from experiments.engine import cli
from experiments.engine.classifier import ClassifierConfig
from experiments.engine.data.examples import PairData
from experiments.engine.presets import PAPER_DROPOUT, Preset, cpu_optimizer, paper_optimizer
from experiments.engine.suite import Experiment, Presets

TASK = "retrieval"
LENGTH, CPU_LENGTH = 64_000, 1024

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
            remat=True,
            readout="first",
        ),
        config=PAPER_CONFIG,
        data=PairData(LENGTH, VOCABULARY),
        optimizer=paper_optimizer(3e-4, weight_decay=0.01),
        batch_size=4,
        accumulate=16,
        epochs=50,
        warmup=0.1,
    ),
    "cpu": Preset(
        sizes=ClassifierConfig(width=64, num_layers=1, num_heads=2, mlp_width=128, readout="halves"),
        # Blocks are as large as in the paper: with blocks of 64, the sparse branch alone learns nothing in these steps.
        config=dataclasses.replace(CPU_CONFIG, sparse=dataclasses.replace(CPU_CONFIG.sparse, block_size=256)),
        data=PairData(CPU_LENGTH, CPU_VOCABULARY, train_pairs=100_000),
        optimizer=cpu_optimizer(2e-3, weight_decay=0.05),
        batch_size=16,
        steps=500,
    ),
}


EXPERIMENT = Experiment(TASK, "Text retrieval: whether two long texts are from the same archive.", PRESETS)
make_parser, run = EXPERIMENT.make_parser, EXPERIMENT.run

if __name__ == "__main__":
    cli.main(EXPERIMENT.main)
