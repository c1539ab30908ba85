"""Checks that a data set is refused in one sentence."""

import numpy as np
import pytest

from experiments.engine.data import catalog, raw, store
from experiments.engine.errors import EngineError


@pytest.fixture
def fresh():
    """Forgets the sets that other tests have opened."""
    store._open.cache_clear()


def refused(message, name, data_dir):
    """Checks that a set cannot be opened, and that one sentence says why."""
    store._open.cache_clear()
    with pytest.raises(EngineError, match=message) as caught:
        store.open_split(name, "train", data_dir)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert not list((data_dir / "prepared").glob(f"{name}/*/*array_record*"))


def refused_archive(message, name, folder, split="train"):
    """Checks that a published archive cannot be read, and that one sentence says why."""
    data_set = catalog.find(name)
    with pytest.raises(EngineError, match=message) as caught:
        list(raw.examples(data_set, data_set.forms[-1], folder, split))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def change_pack(path, **arrays):
    """Replaces arrays of an image pack."""
    with np.load(path) as pack:
        before = dict(pack)
    np.savez(path, **before | arrays)
