"""Runs `python -m experiments.benchmark`."""

import os

# The parent process only asks which platform there is; the memory belongs to the processes that measure.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from experiments.benchmark.command import make_parser, run
from experiments.engine import cli

cli.main(lambda: run(make_parser().parse()))
