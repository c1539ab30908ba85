"""Up to how many tokens exact attention is faster than ELSAA, as measured.

`crossover.json` is written by `python -m experiments.benchmark --write-crossover`, by platform. Platforms that nobody
measured have no entry: there `min_length="auto"` takes exact attention at no length.
"""

from __future__ import annotations

import functools
import importlib.resources
import json

import jax

from elsaa_jax.config import SortLshConfig

TABLE = "crossover.json"
AUTO_BASE = 256  # of the causal split where exact attention alone is not faster


@functools.cache
def _table() -> dict[str, dict[str, int]]:
    return json.loads(importlib.resources.files("elsaa_jax.sparse").joinpath(TABLE).read_text())


def longest_exact(is_causal: bool) -> int:
    """The longest sequence for which exact attention is the faster one on this machine's default platform."""
    return _table().get(jax.default_backend(), {}).get("causal" if is_causal else "full", 0)


def is_short(config: SortLshConfig, num_keys: int, is_causal: bool) -> bool:
    """Whether `min_length="auto"` asks for exact attention alone."""
    return config.min_length == "auto" and num_keys <= longest_exact(is_causal)


def resolve_min_length(config: SortLshConfig, num_keys: int, is_causal: bool) -> int:
    """`min_length` as a number, for this many keys."""
    if config.min_length != "auto":
        return config.min_length
    if is_short(config, num_keys, is_causal):
        return num_keys
    return AUTO_BASE if is_causal else 0
