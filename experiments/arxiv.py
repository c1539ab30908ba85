"""ArXiv: the archive of papers that are packed to one long input.

Claim: topics are spread over the text, so a low-rank summary is enough. Causal ELSAA works at 64,000 tokens.

Command: python -m experiments.arxiv --variant full_32k --attention elsaa,exact

Papers of one class are packed to 32,000 or 64,000 tokens in the preset "paper", and to 2,048 or 4,096 tokens in the
preset "cpu". Names of archives are removed from the texts. Results: docs/results/paper.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Literal

from elsaa_jax import ElsaaConfig, RaceConfig, SortLshConfig
from experiments.engine import cli, suite
from experiments.engine.classifier import ClassifierConfig
from experiments.engine.data.examples import PaperData
from experiments.engine.presets import PAPER_DROPOUT, Preset, cpu_optimizer, paper_attention, paper_optimizer
from experiments.engine.results import Rows
from experiments.engine.suite import Presets

Variant = Literal["full_32k", "causal_32k", "causal_64k"]

VOCABULARY, CPU_VOCABULARY = 50_000, 20_000
PAPER_SIZES = ClassifierConfig(
    width=256,
    num_layers=4,
    num_heads=4,
    mlp_width=1024,
    positions="learned",
    num_positions=32_000,
    dropout_rate=PAPER_DROPOUT,
    remat=True,
)
PAPER_CONFIG = paper_attention(bits=4, tables=4, ensembles=1, lsh_bits=5, block=256, min_length=4096, gate=64)
CPU_SIZES = ClassifierConfig(width=64, num_layers=1, num_heads=2, mlp_width=128, dropout_rate=0.1)
CPU_CONFIG = ElsaaConfig(
    race=RaceConfig(num_tables=4, num_bits=4, chunk_size=128),
    sparse=SortLshConfig(num_bits=5, block_size=64, min_length=256),
)


def _causal(preset: Preset, length: int, base: int, layers: int, **changes: Any) -> Preset:
    """Returns the preset at another length, with causal attention and the answer read at the last token."""
    sparse = dataclasses.replace(preset.config.sparse, min_length=base)
    return dataclasses.replace(
        preset,
        sizes=dataclasses.replace(
            preset.sizes, is_causal=True, readout="last", num_positions=length, num_layers=layers
        ),
        config=dataclasses.replace(preset.config, sparse=sparse),
        data=dataclasses.replace(preset.data, length=length),
        **changes,
    )


PAPER = Preset(
    sizes=PAPER_SIZES,
    config=PAPER_CONFIG,
    data=PaperData(32_000, VOCABULARY),
    optimizer=paper_optimizer(3e-4, weight_decay=0.01),
    batch_size=8,
    accumulate=16,
    epochs=33,
    warmup=0.1,
)
CPU = Preset(
    sizes=CPU_SIZES,
    config=CPU_CONFIG,
    data=PaperData(2048, CPU_VOCABULARY),
    optimizer=cpu_optimizer(2e-3, weight_decay=0.1),
    batch_size=8,
    steps=300,
)
VARIANTS: dict[Variant, Presets] = {
    "full_32k": {"paper": PAPER, "cpu": CPU},
    "causal_32k": {
        "paper": _causal(PAPER, 32_000, base=2048, layers=4, warmup=0.05),
        "cpu": _causal(CPU, 2048, base=256, layers=2),
    },
    "causal_64k": {
        "paper": _causal(PAPER, 64_000, base=8192, layers=4, warmup=0.05),
        "cpu": _causal(CPU, 4096, base=512, layers=2, batch_size=4),
    },
}


def task_of(variant: Variant) -> str:
    """Returns the name of a variant in results."""
    return f"arxiv_{variant}"


def make_parser() -> cli.Parser:
    """Returns the parser of the command line."""
    parser = suite.make_parser("ArXiv: the archive of papers that are packed to one long input.")
    parser.add_argument(
        "--variant",
        choices=tuple(VARIANTS),
        default="full_32k",
        help="Full or causal attention, and the length of the inputs in the paper.",
    )
    return parser


def run(arguments: argparse.Namespace) -> Rows:
    """Trains and evaluates every chosen attention, prints a table and returns its rows."""
    return suite.run(task_of(arguments.variant), VARIANTS[arguments.variant], arguments)


if __name__ == "__main__":
    cli.main(lambda: run(make_parser().parse()))
