"""Runs `python -m experiments.paper`."""

from experiments.engine import cli
from experiments.paper.command import make_parser, run

cli.main(lambda: run(make_parser().parse()))
