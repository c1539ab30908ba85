"""Runs `python -m experiments.niah`."""

from experiments.engine import cli
from experiments.niah.command import make_parser, run

cli.main(lambda: run(make_parser().parse()))
