"""The length up to which exact attention is faster than ELSAA, as measured.

`python -m experiments.benchmark --write-crossover` writes `crossover.json`, by platform. A platform without a
measurement has no entry: there `min_length="auto"` never chooses exact attention.
"""

from __future__ import annotations

import functools
import importlib.resources
import json

import jax

TABLE = "crossover.json"
AUTO_BASE = 256  # Length of a stretch if exact attention alone is not faster.


@functools.cache
def _table() -> dict[str, dict[str, int]]:
    return json.loads(importlib.resources.files("elsaa_jax.sparse").joinpath(TABLE).read_text())


def longest_exact(is_causal: bool) -> int:
    """Returns the longest sequence for which exact attention is faster on the default platform of this machine."""
    return _table().get(jax.default_backend(), {}).get("causal" if is_causal else "full", 0)


def resolve_min_length(num_keys: int, is_causal: bool) -> int:
    """Returns the number that `min_length="auto"` stands for; it is `num_keys` if exact attention alone is faster."""
    if num_keys <= longest_exact(is_causal):
        return num_keys
    return AUTO_BASE if is_causal else 0
