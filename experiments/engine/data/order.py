"""The order in which examples come: a pure function of the seed and of how many came before.

So a run needs no state of its data in its checkpoint: it goes on in the middle of an epoch by the number of its step.
"""

from __future__ import annotations

import functools

import numpy as np


def shuffled(size: int, position: int, count: int, seed: int) -> np.ndarray:
    """The indices of the `count` examples that follow `position` examples.

    Every epoch has each example once, in an order of its own; a batch may lie over the end of an epoch.
    """
    places = np.arange(position, position + count)
    epochs = places // size
    return np.concatenate(
        [_epoch(size, int(epoch), seed)[places[epochs == epoch] % size] for epoch in np.unique(epochs)]
    )


@functools.lru_cache(maxsize=4)
def _epoch(size: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
