"""The order of training examples: a pure function of the seed and of the number of examples before.

A checkpoint therefore needs no state of the data: a run continues in the middle of an epoch from its step number alone.
"""

from __future__ import annotations

import functools

import numpy as np


def shuffled(size: int, position: int, count: int, seed: int) -> np.ndarray:
    """Returns the indices of the `count` examples that follow the first `position` examples.

    Every epoch has each example once, in a new order. A batch may cross the end of an epoch.

    Args:
      size: Number of examples of an epoch.
      position: Number of examples that came before.
      count: Number of indices.
      seed: Random seed of the order.
    """
    places = np.arange(position, position + count)
    epochs = places // size
    return np.concatenate(
        [_epoch(size, int(epoch), seed)[places[epochs == epoch] % size] for epoch in np.unique(epochs)]
    )


@functools.lru_cache(maxsize=4)
def _epoch(size: int, epoch: int, seed: int) -> np.ndarray:
    """Returns the order of one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(size)
