"""Small data sets in the raw forms of the published ones, written by NumPy and the standard library alone."""

import dataclasses
import gzip
import io
import json
import lzma
import os
import pathlib
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image

from experiments.engine.data import catalog, store

FASHION_COUNTS = {"train": 12, "test": 5}
# As they are when tests are collected; no test finds them in its environment.
REAL, REAL_PREPARED = os.environ.get(store.DATA_DIR), os.environ.get(store.PREPARED_DIR)
needs_real_data = pytest.mark.skipif(not REAL, reason=f"{store.DATA_DIR} does not name a directory of data sets")


def real(name: str) -> pathlib.Path:
    """The folder of the raw files of a set; skips the test where they are not there."""
    folder = pathlib.Path(REAL) / name
    for file in catalog.find(name).forms[0].files:
        if not (folder / file.name).is_file():
            pytest.skip(f"{folder / file.name} is not there")
    return folder


def write_fashion(data_dir: pathlib.Path) -> None:
    folder = data_dir / "fashion_mnist"
    folder.mkdir(parents=True)
    for split, start in (("train", "train"), ("test", "t10k")):
        images = fashion_images(split)
        labels = np.arange(len(images), dtype=np.uint8) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{start}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))


def fashion_images(split: str) -> np.ndarray:
    shape = (FASHION_COUNTS[split], 28, 28)
    return np.random.default_rng(len(split)).integers(256, size=shape, dtype=np.uint8)


def write_imdb(data_dir: pathlib.Path, reviews: dict[tuple[str, str], list[str]]) -> None:
    """Reviews by split and "neg" or "pos"."""
    folder = data_dir / "imdb"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "aclImdb.tar.gz", "w:gz") as archive:
        for (split, kind), texts in reviews.items():
            for index, text in enumerate(texts):
                data = text.encode()
                member = tarfile.TarInfo(f"aclImdb/{split}/{kind}/{index}_1.txt")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def write_arxiv(data_dir: pathlib.Path, texts: dict[str, list[tuple[int, str]]]) -> None:
    """Classes and texts by split."""
    folder = data_dir / "arxiv11"
    folder.mkdir(parents=True)
    for split, rows in texts.items():
        lines = [
            json.dumps({"id": f"{split}{index}", "label11": label, "text": text})
            for index, (label, text) in enumerate(rows)
        ]
        (folder / f"{split}.jsonl.xz").write_bytes(lzma.compress("\n".join(lines).encode()))


def paper_text(seed: int, label: int, words: int = 1100) -> str:
    """Words of one class, and words of its own."""
    rng = np.random.default_rng([seed, label])
    return " ".join(f"class{label}word{i}" if i % 2 else f"word{i}" for i in rng.integers(50, size=words))


def write_pack(data_dir: pathlib.Path, name: str, count: int = 8, classes: int = 2) -> None:
    """An image pack: the images of class 0 are dark, the others bright; every fourth one is a test image."""
    data_set = catalog.find(name)
    blobs = []
    for index in range(count):
        buffer = io.BytesIO()
        level = 60 + 120 * (index % classes) // max(1, classes - 1)
        Image.fromarray(np.full((40, 50, 3), level, np.uint8)).save(buffer, "JPEG")
        blobs.append(np.frombuffer(buffer.getvalue(), np.uint8))
    folder = data_dir / name
    folder.mkdir(parents=True)
    np.savez(
        folder / data_set.forms[0].files[0].name,
        blob=np.concatenate(blobs),
        off=np.cumsum([0, *map(len, blobs)]),
        label=(np.arange(count) % classes).astype(np.int16),
        split=(np.arange(count) % 4 == 3).astype(np.uint8),
        names=np.array([f"image{index}" for index in range(count)]),
        classes=np.array([f"class{index}" for index in range(classes)]),
    )


@pytest.fixture
def unpublished(monkeypatch):
    """The data sets without their published check sums, which small ones cannot have."""
    for name, data_set in catalog.DATA_SETS.items():
        forms = tuple(
            dataclasses.replace(form, files=tuple(dataclasses.replace(file, sha256=None) for file in form.files))
            for form in data_set.forms
        )
        monkeypatch.setitem(catalog.DATA_SETS, name, dataclasses.replace(data_set, forms=forms))
