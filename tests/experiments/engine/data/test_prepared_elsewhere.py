"""Prepared sets from elsewhere: no module that they name is imported, and their labels are checked."""

import json
import sys

import numpy as np
import pytest

from experiments.engine.data import manifest, papers, reviews, store, sums
from experiments.engine.data.examples import ImageData
from experiments.engine.errors import EngineError
from tests.experiments.engine.data.raw_sets import (
    paper_text,
    unpublished,  # noqa: F401
    write_pack,
)
from tests.experiments.engine.data.refusals import (
    fresh,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("unpublished", "fresh")


class Prepared:
    """A split of a prepared set that somebody else has made."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


@pytest.mark.parametrize("label", [-1, 11, 10**6])
def test_labels_of_a_prepared_set_outside_the_classes(monkeypatch, label):
    texts = [{"text": paper_text(index, 0), "label": index % 11, "id": str(index)} for index in range(44)]
    texts[5] = texts[5] | {"label": label}
    pixels = [{"image": np.zeros((8, 8, 3), np.uint8), "label": label}]
    for module in (papers, reviews):
        monkeypatch.setattr(module, "open_split", lambda *args: Prepared(texts))
    monkeypatch.setattr("experiments.engine.data.examples.open_split", lambda *args: Prepared(pixels))
    with pytest.raises(EngineError, match=rf"arxiv11 has the label {label}, and must have labels from 0 to 10"):
        papers.load_papers("labels of papers", 100)
    with pytest.raises(EngineError, match=r"imdb has the label -?\d+, and must have labels from 0 to 1;"):
        reviews.load_reviews("labels of reviews", 64, 100)
    with pytest.raises(EngineError, match=rf"food101 has the label {label}, and the model 10 classes"):
        ImageData("food101", 10, size=8, patch_size=4).read("test", np.arange(1))


def rewrite_features(directory, text):
    """Changes features.json, and its sum in the manifest."""
    path = directory / "features.json"
    path.write_text(text)
    listed = json.loads((directory / manifest.MANIFEST).read_text())
    listed["files"]["features.json"] = sums.sha256_of(path)
    (directory / manifest.MANIFEST).write_text(json.dumps(listed))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("tensorflow_datasets.core.features.features_dict", "a_module_of_a_stranger"),
        lambda text: text.replace("tensorflow_datasets.core.features.scalar", "a_module_of_a_stranger"),
        lambda text: text.replace("tensorflow_datasets.core.features.scalar", "a_module_of_a_stranger").replace(
            "pythonClassName", "python_class_name"
        ),
        lambda text: '{"type": "a_module_of_a_stranger.Feature", "content": {}}',
        lambda text: json.dumps({"type": "a_module_of_a_stranger.Feature", "content": {}} | json.loads(text)),
    ],
    ids=["top", "feature", "other_spelling", "legacy", "legacy_and_right"],
)
def test_no_module_that_a_prepared_set_names_is_imported(tmp_path, monkeypatch, change):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/a_module_of_a_stranger.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'imported')!r}).touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    write_pack(tmp_path, "food101")
    store.open_split("food101", "train", tmp_path)
    directory = tmp_path / "prepared/food101/1.0.0"
    rewrite_features(directory, change((directory / "features.json").read_text()))
    store._open.cache_clear()
    with pytest.raises(EngineError, match=r"features.json does not describe the examples of food101; remove the dir"):
        store.open_split("food101", "train", tmp_path)
    assert not (tmp_path / "imported").exists()
    assert "a_module_of_a_stranger" not in sys.modules


def test_prepared_metadata_that_cannot_be_read(tmp_path):
    write_pack(tmp_path, "food101")
    store.open_split("food101", "train", tmp_path)
    directory = tmp_path / "prepared/food101/1.0.0"
    whole = (directory / "features.json").read_text()
    for text in ("{", "", "[" * 100_000, "\udcff"):
        (directory / "features.json").write_bytes(text.encode(errors="surrogateescape"))
        listed = json.loads((directory / manifest.MANIFEST).read_text())
        listed["files"]["features.json"] = sums.sha256_of(directory / "features.json")
        (directory / manifest.MANIFEST).write_text(json.dumps(listed))
        store._open.cache_clear()
        with pytest.raises(EngineError, match=r"features.json is damaged \(.*\); remove the directory"):
            store.open_split("food101", "train", tmp_path)
    rewrite_features(directory, whole)
    info = directory / "dataset_info.json"
    for text in ("{", "{}", info.read_text().replace('"name": "train"', '"name": "other"')):
        info.write_text(text)
        listed = json.loads((directory / manifest.MANIFEST).read_text())
        listed["files"]["dataset_info.json"] = sums.sha256_of(info)
        (directory / manifest.MANIFEST).write_text(json.dumps(listed))
        store._open.cache_clear()
        with pytest.raises(EngineError, match=r"1.0.0 cannot be read \(.*\); remove the directory") as caught:
            store.open_split("food101", "train", tmp_path)
        assert "\n" not in str(caught.value)


def test_files_that_the_manifest_does_not_list(tmp_path):
    write_pack(tmp_path, "food101")
    store.open_split("food101", "train", tmp_path)
    directory = tmp_path / "prepared/food101/1.0.0"
    (directory / "notes.txt").write_text("of a person")
    store._open.cache_clear()
    assert len(store.open_split("food101", "train", tmp_path)) == 6
    listed = json.loads((directory / manifest.MANIFEST).read_text())
    del listed["files"]["features.json"]
    (directory / manifest.MANIFEST).write_text(json.dumps(listed))
    store._open.cache_clear()
    with pytest.raises(EngineError, match=r"features.json was not there when the set was prepared; remove the dir"):
        store.open_split("food101", "train", tmp_path)
