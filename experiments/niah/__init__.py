"""Needle in a haystack: `python -m experiments.niah`. `load` returns a trained model as a function."""

from experiments.niah.command import load

__all__ = ["load"]
