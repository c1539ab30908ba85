"""Draws examples of needle in a haystack: `[filler .. KEY VALUE .. filler] SEP KEY` -> VALUE.

The keys of one example differ. Values are drawn independently of the keys, and both are drawn anew for each example, so
only the context tells the value of a key.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

NUM_FILLER, NUM_KEYS, NUM_VALUES = 50, 64, 64
FIRST_KEY = NUM_FILLER
FIRST_VALUE = FIRST_KEY + NUM_KEYS
SEPARATOR = FIRST_VALUE + NUM_VALUES
VOCABULARY = SEPARATOR + 1
# Needles lie between these depths of the context.
DEPTHS = (0.05, 0.95)


class Examples(NamedTuple):
    """A batch of examples.

    Attributes:
      tokens: Token ids, (batch, length) int32. Each row ends with `SEP KEY`, once for each query.
      answers: Values of the keys that are asked for, (batch, queries) int32, in the order of the queries.
      depths: Depth of the needle of the last query, from 0 to 1, (batch,).
    """

    tokens: np.ndarray
    answers: np.ndarray
    depths: np.ndarray


def make_examples(
    rng: np.random.Generator, batch: int, length: int, *, needles: int = 1, queries: int = 1, depth: float | None = None
) -> Examples:
    """Draws a batch of examples.

    Args:
      rng: Random generator.
      batch: Number of examples.
      length: Number of tokens per example.
      needles: Number of pairs of key and value in the context.
      queries: Number of keys that are asked for at the end; they are those of the last needles drawn.
      depth: Depth of the needle of the last query. None draws it uniformly between 5 % and 95 %.
    """
    if not 1 <= queries <= needles <= NUM_KEYS:
        raise ValueError(
            f"queries is {queries} and needles is {needles}; it must be 1 <= queries <= needles <= {NUM_KEYS}"
        )
    if depth is not None and not DEPTHS[0] <= depth <= DEPTHS[1]:
        raise ValueError(f"depth is {depth!r}; it must lie from {DEPTHS[0]} to {DEPTHS[1]}")
    context = length - 2 * queries
    first, end = math.ceil(DEPTHS[0] * context), math.floor(DEPTHS[1] * context)
    num_places, num_slots = end - first - 1, (end - first - 1) // 2
    if num_slots < needles:
        raise ValueError(f"length is {length}; it is too short for {needles} needles and {queries} queries")
    if depth is None:
        asked = rng.integers(num_places, size=(batch, 1))
    else:
        asked = np.full((batch, 1), round((depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0]) * (num_places - 1)))
    places = first + np.concatenate([_other_places(rng, asked, num_slots, needles - 1), asked], axis=1)
    # The needle of the last query is the last one drawn; needles that are not asked for come first.
    keys = FIRST_KEY + rng.permuted(np.tile(np.arange(NUM_KEYS), (batch, 1)), axis=1)[:, :needles]
    values = FIRST_VALUE + rng.integers(NUM_VALUES, size=(batch, needles))
    tokens = rng.integers(NUM_FILLER, size=(batch, length), dtype=np.int32)
    np.put_along_axis(tokens, places, keys.astype(np.int32), axis=1)
    np.put_along_axis(tokens, places + 1, values.astype(np.int32), axis=1)
    tokens[:, context::2] = SEPARATOR
    tokens[:, context + 1 :: 2] = keys[:, -queries:]
    return Examples(tokens, values[:, -queries:].astype(np.int32), (first + asked[:, 0]) / context)


def _other_places(rng: np.random.Generator, asked: np.ndarray, num_slots: int, count: int) -> np.ndarray:
    """Draws (batch, count) places on the grid of pairs that contains `asked`, without the place `asked` itself."""
    if not count:
        return np.zeros((len(asked), 0), int)
    slots = rng.permuted(np.tile(np.arange(num_slots), (len(asked), 1)), axis=1)
    taken = slots == asked // 2
    free = np.take_along_axis(slots, np.argsort(taken, axis=1, kind="stable"), axis=1)[:, :count]
    return 2 * free + asked % 2
