"""Runs `python -m experiments.rank`."""

from experiments.engine import cli
from experiments.rank.command import make_parser, run

cli.main(lambda: run(make_parser().parse()))
