"""Measures the walk of one training step through the library; `python -m tests.walk` prints it as markdown.

The walk is the list of the functions of `elsaa_jax` in the order of their first call, while one training step of a
causal ELSAA layer with the needle experiment's config is traced. A switch is a change of file between two consecutive
functions. Fewer switches make the code easier to read in the order in which it runs.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import elsaa_jax
from elsaa_jax import ELSAA
from experiments.niah.presets import PRESETS

ROOT = pathlib.Path(elsaa_jax.__file__).parent


def walk() -> list[tuple[str, str]]:
    """Returns the file and the name of each function, nested ones and comprehensions included."""
    layer = ELSAA(num_heads=4, is_causal=True, config=PRESETS["default"].config, deterministic=False)
    x = jnp.ones((2, 1024, 64))
    variables = layer.init({name: jax.random.key(0) for name in ("params", "hashes", "dropout")}, x)
    calls: dict[tuple[str, str], None] = {}

    def loss(params: Any) -> jax.Array:
        return layer.apply({**variables, "params": params}, x, rngs={"dropout": jax.random.key(0)}).sum()

    def record(frame: FrameType, event: str, _: Any) -> None:
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            calls.setdefault((path.relative_to(ROOT).as_posix(), frame.f_code.co_qualname.replace(".<locals>", "")))

    jax.clear_caches()
    before = sys.getprofile()
    sys.setprofile(record)
    try:
        jax.jit(jax.value_and_grad(loss)).trace(variables["params"])
    finally:
        sys.setprofile(before)
    return list(calls)


def switches(calls: list[tuple[str, str]]) -> int:
    """Counts the changes of file between consecutive functions."""
    return sum(first[0] != second[0] for first, second in itertools.pairwise(calls))


def visits(calls: list[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Groups consecutive named functions of one file; lambdas and comprehensions are left out."""
    named = [call for call in calls if "<" not in call[1]]
    return [(file, [name for _, name in group]) for file, group in itertools.groupby(named, lambda call: call[0])]


if __name__ == "__main__":
    found = walk()
    print(f"{switches(found)} switches\n")
    for number, (file, names) in enumerate(visits(found), start=1):
        print(f"{number}. `{file}`: {', '.join(f'`{name}`' for name in names)}")
