"""Images as long sequences of patches: Fashion-MNIST, Oxford-IIIT Pet, Flowers-102 and Food-101.

Claim: attention in images is peaked, so the sparse branch adds to the low-rank one.

Command: python -m experiments.vision --dataset fashion_mnist --attention elsaa,exact

Fashion-MNIST has one token for each of its 784 pixels. The other data sets have 16,384 patches in the preset "paper",
and 256 in the preset "cpu". Results: docs/results/paper.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Literal

from elsaa_jax import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from experiments.engine import cli, suite
from experiments.engine.classifier import ClassifierConfig, Readout
from experiments.engine.data.examples import ImageData
from experiments.engine.presets import PAPER_DROPOUT, Preset, cpu_optimizer, paper_attention, paper_optimizer
from experiments.engine.results import Rows
from experiments.engine.suite import Presets

DataSet = Literal["fashion_mnist", "oxford_pets", "flowers102", "food101"]

PAPER_CONFIG = paper_attention(bits=2, tables=5, ensembles=1, lsh_bits=4, block=32, min_length=256, gate=128)
CPU_CONFIG = ElsaaConfig(
    race=RaceConfig(num_tables=5, num_bits=2),
    sparse=SortLshConfig(num_bits=4, block_size=32),
    fusion=FusionConfig(gate_hidden=16),
)


def _sizes(data: ImageData, readout: Readout = "class", **sizes: Any) -> ClassifierConfig:
    """Returns sizes with a learned position for each patch, and for a class token if the answer is read there."""
    return ClassifierConfig(
        positions="learned",
        num_positions=data.length + (readout == "class"),
        readout=readout,
        patch_size=data.patch_size,
        **sizes,
    )


def _paper(data: ImageData) -> Preset:
    return Preset(
        sizes=_sizes(data, num_layers=2, num_heads=4, width=384, mlp_width=1536, dropout_rate=PAPER_DROPOUT),
        config=PAPER_CONFIG,
        data=data,
        optimizer=paper_optimizer(6e-4, weight_decay=0.1),
        batch_size=32,
        epochs=150,
        warmup=0.01,
    )


def _cpu(data: ImageData, sizes: ClassifierConfig, learning_rate: float, steps: int) -> Preset:
    return Preset(
        sizes=sizes,
        config=CPU_CONFIG,
        data=data,
        optimizer=cpu_optimizer(learning_rate, weight_decay=0.05),
        batch_size=32,
        steps=steps,
    )


def _colours(name: DataSet, classes: int) -> Presets:
    paper = _paper(ImageData(name, classes, size=512, patch_size=4))
    paper = dataclasses.replace(paper, sizes=dataclasses.replace(paper.sizes, remat=True))
    if name == "food101":
        paper = dataclasses.replace(
            paper,
            sizes=dataclasses.replace(paper.sizes, num_layers=8, num_heads=8, width=512, mlp_width=2048),
            optimizer=paper_optimizer(3e-4, weight_decay=0.001),
            batch_size=8,
            accumulate=4,
            epochs=100,
            warmup=0.1,
        )
    small = ImageData(name, classes, size=64, patch_size=4, area=(0.35, 1.0))
    sizes = _sizes(small, num_layers=2, num_heads=2, width=48, mlp_width=96, patch_margin=2, grid_positions=True)
    return {"paper": paper, "cpu": _cpu(small, sizes, learning_rate=3e-3, steps=700)}


FASHION = ImageData("fashion_mnist", 10, size=28, patch_size=1, augmentation="padded_crop")
# Training sees each image at most once, so images are not augmented. Most pixels are background: with a class token or
# the mean over all pixels, a model learns far more slowly than with the maximum of each feature.
CPU_FASHION = dataclasses.replace(FASHION, padding=0, flip=False)
CPU_FASHION_SIZES = _sizes(
    CPU_FASHION,
    readout="max",
    num_layers=1,
    num_heads=2,
    width=48,
    mlp_width=192,
    patch_margin=3,
    grid_positions=True,
)
PRESETS: dict[DataSet, Presets] = {
    "fashion_mnist": {
        "paper": _paper(FASHION),
        "cpu": _cpu(CPU_FASHION, CPU_FASHION_SIZES, learning_rate=1e-2, steps=600),
    },
    "oxford_pets": _colours("oxford_pets", 37),
    "flowers102": _colours("flowers102", 102),
    "food101": _colours("food101", 101),
}


def make_parser() -> cli.Parser:
    """Returns the parser of the command line."""
    parser = suite.make_parser("Images as long sequences of patches, from four data sets.")
    parser.add_argument("--dataset", choices=tuple(PRESETS), default="fashion_mnist", help="Data set of images.")
    return parser


def run(arguments: argparse.Namespace) -> Rows:
    """Trains and evaluates every chosen attention, prints a table and returns its rows."""
    return suite.run(arguments.dataset, PRESETS[arguments.dataset], arguments)


if __name__ == "__main__":
    cli.main(lambda: run(make_parser().parse()))
