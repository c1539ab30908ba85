"""Readers of the archives in which image data sets are published."""

from __future__ import annotations

import collections
import io
import pathlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image, UnidentifiedImageError

from experiments.engine.data import limits
from experiments.engine.data.catalog import Form, SplitName

Example = dict[str, Any]
Examples = Iterator[tuple[str, Example]]


def check_label(label: object, num_classes: int, name: str) -> int:
    """Returns a label if it is an integer from 0 to num_classes - 1, and refuses any other."""
    if type(label) is not int or not 0 <= label < num_classes:
        raise ValueError(f"the label of {name} is {label!r}, and must be an integer from 0 to {num_classes - 1}")
    return label


def encode_image(data: bytes, name: str) -> io.BytesIO:
    """Returns an image file in colour that can be decoded: a JPEG file in colour as it is, any other as a PNG file.

    An image that cannot be decoded, or that has so many pixels that Pillow warns of it, is refused here rather than in
    training.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                if image.format == "JPEG" and image.mode == "RGB":
                    return io.BytesIO(data)
                buffer = io.BytesIO()
                image.convert("RGB").save(buffer, "PNG")
    except UnidentifiedImageError as error:  # Its own text names an object in memory.
        raise ValueError(f"the image {name} has a format that is not known") from error
    # Pillow raises a SyntaxError where a PNG file is broken.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"the image {name} cannot be decoded: {error}") from error
    return io.BytesIO(buffer.getvalue())


def _labelled_images(path: pathlib.Path, labels: dict[str, int]) -> Examples:
    """Yields the images of a tar that have a label, by their names in it."""
    found = 0
    for name, data in limits.read_tar(path, labels.__contains__):
        found += 1
        yield name, {"image": encode_image(data, name), "label": labels[name]}
    if found != len(labels):
        raise ValueError(f"{path.name} has {found} of {len(labels)} images")


def _unique(pairs: Sequence[tuple[str, int]], name: str) -> dict[str, int]:
    """Returns labels by image; refuses a list that names an image twice."""
    labels = dict(pairs)
    if len(labels) != len(pairs):
        ((twice, _),) = collections.Counter(image for image, _ in pairs).most_common(1)
        raise ValueError(f"{name} names {twice} twice")
    return labels


def read_pets(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    """Yields the pets of a split.

    A line of trainval.txt or test.txt has the name of an image, its class from 1 to 37, its species and its breed.
    """
    images, annotations = (folder / file.name for file in form.files)
    member = f"annotations/{'trainval' if split == 'train' else 'test'}.txt"
    (text,) = limits.read_tar_texts(annotations, [member])
    fields = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pairs = [(f"images/{name}.jpg", int(label) - 1) for name, label, *_ in fields]
    yield from _labelled_images(images, _unique(pairs, member))


def read_flowers(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    """Yields the flowers of a split: the images `trnid` for training, `tstid` for testing. Images count from 1."""
    from scipy.io import loadmat

    images, labels, ids = (folder / file.name for file in form.files)
    # loadmat may crash on a damaged file. The catalog has the sums of both files, which are checked before.
    classes = loadmat(labels)["labels"][0]
    pairs = []
    for index in loadmat(ids)["trnid" if split == "train" else "tstid"][0].tolist():
        if not 1 <= index <= len(classes):
            raise ValueError(
                f"{ids.name} names the image {index}, and {labels.name} has the images 1 to {len(classes)}"
            )
        pairs.append((f"jpg/image_{index:05d}.jpg", int(classes[index - 1]) - 1))
    yield from _labelled_images(images, _unique(pairs, ids.name))


def read_food(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    """Yields the food of a split.

    A line of train.txt or test.txt has class/id, and classes.txt lists the classes in the order of their labels.
    """
    path = folder / form.files[0].name
    member = f"food-101/meta/{split}.txt"
    classes, names = (text.split() for text in limits.read_tar_texts(path, ["food-101/meta/classes.txt", member]))
    labels = {name: index for index, name in enumerate(classes)}
    pairs = []
    for name in names:
        kind = name.split("/")[0]
        if kind not in labels:
            raise ValueError(f"{member} names the class {kind}, which classes.txt does not list")
        pairs.append((f"food-101/images/{name}.jpg", labels[kind]))
    yield from _labelled_images(path, _unique(pairs, member))


def read_tiny_imagenet(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    """Yields the images of a split. The validation images are the test split, because test labels are not published.

    Training images are in folders of their classes; val_annotations.txt has the classes of the validation images.
    """
    top = "tiny-imagenet-200"
    with limits.open_zip(folder / form.files[0].name) as archive:
        ids = limits.read_zip_text(archive, f"{top}/wnids.txt").split()
        labels = {name: index for index, name in enumerate(sorted(ids))}
        if split == "train":
            names = [name for name in archive.namelist() if name.startswith(f"{top}/train/") and name.endswith(".JPEG")]
            kinds = [(name, name.split("/")[2]) for name in names]
        else:
            lines = limits.read_zip_text(archive, f"{top}/val/val_annotations.txt").splitlines()
            fields = [line.split("\t") for line in lines if line.strip()]
            kinds = [(f"{top}/val/images/{name}", kind) for name, kind, *_ in fields]
        for name, kind in kinds:
            if kind not in labels:
                raise ValueError(f"{name} has the class {kind}, which wnids.txt does not list")
            yield name, {"image": encode_image(limits.read_zip(archive, name), name), "label": labels[kind]}
