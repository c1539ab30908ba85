"""Examples of needle in a haystack: `[filler .. KEY VALUE .. filler] SEP KEY` -> VALUE.

Keys of one example differ, values are drawn independently of them, and both anew for each example, so that nothing but
the context tells the value of a key.
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
# Needles lie within this part of the context.
DEPTHS = (0.05, 0.95)


class Examples(NamedTuple):
    """A batch of examples.

    Attributes:
      tokens: (batch, length) int32; they end with `SEP KEY`, once for each query.
      answers: (batch, queries) int32, the values of the keys asked; the one asked last is the last.
      depths: (batch,), where in the context the needle asked last lies, from 0 to 1.
    """

    tokens: np.ndarray
    answers: np.ndarray
    depths: np.ndarray


def make_examples(
    rng: np.random.Generator, batch: int, length: int, *, needles: int = 1, queries: int = 1, depth: float | None = None
) -> Examples:
    """Draws a batch.

    Args:
      rng: the randomness.
      batch: number of examples.
      length: tokens of each.
      needles: pairs of key and value in the context; the last `queries` of them are asked.
      queries: how many keys are asked at the end.
      depth: where in the context the needle asked last lies; None: anywhere between 5 % and 95 %, uniformly.
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
    # The last of the queries is the last of the needles; the needles that are not asked come first.
    keys = FIRST_KEY + rng.permuted(np.tile(np.arange(NUM_KEYS), (batch, 1)), axis=1)[:, :needles]
    values = FIRST_VALUE + rng.integers(NUM_VALUES, size=(batch, needles))
    tokens = rng.integers(NUM_FILLER, size=(batch, length), dtype=np.int32)
    np.put_along_axis(tokens, places, keys.astype(np.int32), axis=1)
    np.put_along_axis(tokens, places + 1, values.astype(np.int32), axis=1)
    tokens[:, context::2] = SEPARATOR
    tokens[:, context + 1 :: 2] = keys[:, -queries:]
    return Examples(tokens, values[:, -queries:].astype(np.int32), (first + asked[:, 0]) / context)


def _other_places(rng: np.random.Generator, asked: np.ndarray, num_slots: int, count: int) -> np.ndarray:
    """(batch, count) places on the grid of pairs that the place `asked` is part of, but for its own."""
    if not count:
        return np.zeros((len(asked), 0), int)
    slots = rng.permuted(np.tile(np.arange(num_slots), (len(asked), 1)), axis=1)
    taken = slots == asked // 2
    free = np.take_along_axis(slots, np.argsort(taken, axis=1, kind="stable"), axis=1)[:, :count]
    return 2 * free + asked % 2
