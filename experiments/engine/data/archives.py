"""Images in the archives in which their homes publish them."""

from __future__ import annotations

import io
import pathlib
import tarfile
import zipfile
from collections.abc import Iterator
from typing import Any

from PIL import Image

from experiments.engine.data.catalog import Form

Example = dict[str, Any]
Examples = Iterator[tuple[str, Example]]


def _encoded(data: bytes) -> io.BytesIO:
    """An image file in colour: itself where it is a JPEG file in colour, else as PNG."""
    with Image.open(io.BytesIO(data)) as image:
        if image.format == "JPEG" and image.mode == "RGB":
            return io.BytesIO(data)
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "PNG")
    return io.BytesIO(buffer.getvalue())


def _labelled(path: pathlib.Path, labels: dict[str, int]) -> Examples:
    """The images of a tar that have a label, by their path in it."""
    found = 0
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and member.name in labels:
                file = archive.extractfile(member)
                assert file is not None
                found += 1
                yield member.name, {"image": _encoded(file.read()), "label": labels[member.name]}
    if found != len(labels):
        raise ValueError(f"{path.name} has {found} of {len(labels)} images")


def _text_of(archive: tarfile.TarFile, name: str) -> list[str]:
    file = archive.extractfile(name)
    assert file is not None
    return file.read().decode().split("\n")


def read_pets(form: Form, folder: pathlib.Path, split: str) -> Examples:
    """Lines of trainval.txt and test.txt: name, class from 1 to 37, species, breed."""
    images, annotations = (folder / file.name for file in form.files)
    with tarfile.open(annotations) as archive:
        lines = _text_of(archive, f"annotations/{'trainval' if split == 'train' else 'test'}.txt")
    fields = [line.split() for line in lines if line and not line.startswith("#")]
    yield from _labelled(images, {f"images/{name}.jpg": int(label) - 1 for name, label, *_ in fields})


def read_flowers(form: Form, folder: pathlib.Path, split: str) -> Examples:
    """Ids of images from 1 on: `trnid` to train on, `tstid` to test."""
    from scipy.io import loadmat

    images, labels, ids = (folder / file.name for file in form.files)
    classes = loadmat(labels)["labels"][0]
    chosen = loadmat(ids)["trnid" if split == "train" else "tstid"][0]
    yield from _labelled(images, {f"jpg/image_{index:05d}.jpg": int(classes[index - 1]) - 1 for index in chosen})


def read_food(form: Form, folder: pathlib.Path, split: str) -> Examples:
    """Lines of train.txt and test.txt: class/id; classes.txt has the classes in their order."""
    path = folder / form.files[0].name
    with tarfile.open(path) as archive:
        classes = [line for line in _text_of(archive, "food-101/meta/classes.txt") if line]
        names = [line for line in _text_of(archive, f"food-101/meta/{split}.txt") if line]
    labels = {name: index for index, name in enumerate(classes)}
    yield from _labelled(path, {f"food-101/images/{name}.jpg": labels[name.split("/")[0]] for name in names})


def read_tiny_imagenet(form: Form, folder: pathlib.Path, split: str) -> Examples:
    """Folders of classes in train; val, by its annotations, is the test split: the labels of test are not public."""
    top = "tiny-imagenet-200"
    with zipfile.ZipFile(folder / form.files[0].name) as archive:
        ids = archive.read(f"{top}/wnids.txt").decode().split()
        labels = {name: index for index, name in enumerate(sorted(ids))}
        if split == "train":
            paths = [name for name in archive.namelist() if name.startswith(f"{top}/train/") and name.endswith(".JPEG")]
            chosen = {path: labels[path.split("/")[2]] for path in paths}
        else:
            lines = archive.read(f"{top}/val/val_annotations.txt").decode().splitlines()
            fields = [line.split("\t") for line in lines if line]
            chosen = {f"{top}/val/images/{name}": labels[label] for name, label, *_ in fields}
        for path, label in chosen.items():
            yield path, {"image": _encoded(archive.read(path)), "label": label}
