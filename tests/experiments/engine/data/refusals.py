"""Checks that a data set is refused in one sentence."""

import numpy as np
import pytest

from experiments.engine.data import catalog, raw, store
from experiments.engine.errors import EngineError


@pytest.fixture
def fresh():
    """No set that another test has opened."""
    store._open.cache_clear()


def refused(message, name, data_dir):
    """A set cannot be opened, for one reason in one sentence."""
    store._open.cache_clear()
    with pytest.raises(EngineError, match=message) as caught:
        store.open_split(name, "train", data_dir)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert not list((data_dir / "prepared").glob(f"{name}/*/*array_record*"))


def refused_archive(message, name, folder, split="train"):
    """A published archive cannot be read, for one reason in one sentence."""
    data_set = catalog.find(name)
    with pytest.raises(EngineError, match=message) as caught:
        list(raw.examples(data_set, data_set.forms[-1], folder, split))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def change_pack(path, **arrays):
    with np.load(path) as pack:
        before = dict(pack)
    np.savez(path, **before | arrays)
