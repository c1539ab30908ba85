"""Readers of raw files: each yields the examples of a split with their keys, or refuses a damaged file.

The files have the formats in which the sets are published or handed on: idx files, a tar of reviews, lines of JSON,
plain text (alone or in a zip), archives of images, and image packs (an .npz with the JPEG files end to end).
"""

from __future__ import annotations

import io
import json
import lzma
import math
import pathlib
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from experiments.engine.data import archives, limits
from experiments.engine.data.archives import Examples, check_label, encode_image
from experiments.engine.data.catalog import DataSet, Form, ReaderName, SplitName
from experiments.engine.errors import EngineError, one_line

# Classes of the published set of papers in the order of their labels. A set of one's own has as many.
ARXIV_CLASSES = tuple("math.AC cs.CV cs.AI cs.SY math.GR cs.CE cs.PL cs.IT cs.DS cs.NE math.ST".split())  # noqa: SIM905
LEFT_OUT = -1  # label11 of a paper whose class is too rare
# Errors that the libraries raise when a file is damaged.
DAMAGED = (
    EOFError,
    OSError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    MemoryError,
    OverflowError,
    RuntimeError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def present_form(data_set: DataSet, folder: pathlib.Path) -> Form | None:
    """Returns the form whose raw files are all in the folder; the published one, which is complete, is preferred."""
    return next((form for form in reversed(data_set.forms) if not absent_files(form, folder)), None)


def absent_files(form: Form, folder: pathlib.Path) -> list[str]:
    """Returns the names of the raw files that are not in the folder."""
    return [file.name for file in form.files if not (folder / file.name).is_file()]


def examples(data_set: DataSet, form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    """Yields the examples of a split with their keys.

    Raises an EngineError if a file cannot be read to its end, a key occurs twice, or a label is out of range.
    """
    seen: set[str] = set()
    try:
        for key, example in READERS[form.reader](form, folder, split):
            if key in seen:
                raise ValueError(f"the {split} split has two examples with the name {key}")
            seen.add(key)
            check_label(example["label"], data_set.num_classes, f"{key} in the {split} split")
            yield key, example
    except DAMAGED as error:
        raise EngineError(
            f"a raw file of {data_set.name} in {folder} is damaged ({one_line(error)}); remove it, and get "
            f"it again from {data_set.home}"
        ) from error


def _read_idx(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    start = "train" if split == "train" else "t10k"
    images = _read_idx_array(folder / f"{start}-images-idx3-ubyte.gz", 3)
    labels = _read_idx_array(folder / f"{start}-labels-idx1-ubyte.gz", 1)
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels")
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        yield f"{index:05d}", {"image": io.BytesIO(buffer.getvalue()), "label": int(label)}


def _read_idx_array(path: pathlib.Path, axes: int) -> np.ndarray:
    """Returns the array of an idx file of bytes."""
    with limits.open_stream(path) as stream:
        data = stream.read()
    if data[:4] != bytes((0, 0, 8, axes)):
        raise ValueError(f"{path.name} is no idx file of bytes with {axes} axes")
    shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * axes)
    if math.prod(shape) != len(values):
        raise ValueError(f"{path.name} has {len(values)} values, and its header says {' x '.join(map(str, shape))}")
    return values.reshape(shape)


def _read_reviews(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    path = folder / form.files[0].name

    def parts_of(name: str) -> tuple[str, ...]:
        return pathlib.PurePosixPath(name).parts

    def is_review(name: str) -> bool:
        parts = parts_of(name)
        return len(parts) == 4 and parts[1] == split and parts[2] in ("neg", "pos")

    for name, data in limits.read_tar(path, is_review):
        parts = parts_of(name)
        key = "/".join(parts[1:])
        yield key, {"text": limits.decode(data, f"{name} in {path.name}"), "label": int(parts[2] == "pos"), "id": key}


def _read_rows(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields where each JSON object of a file of lines stands, for messages, and the object."""
    with limits.open_stream(path) as stream:
        for number, line in stream.lines():
            where = f"line {number} of {path.name}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where} is not a JSON object")
            yield where, row


def _text_field(row: dict[str, Any], field: str, where: str) -> str:
    """Returns a field of a row, which must be text that UTF-8 can encode."""
    value = row.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{where} has no text in its field {field!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half of a surrogate pair in its field {field!r}") from error
    return value


def _read_lines(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    for where, row in _read_rows(folder / f"{split}.jsonl.xz"):
        label = row.get("label11")
        if type(label) is int and label == LEFT_OUT:
            continue
        check_label(label, len(ARXIV_CLASSES), where)
        key = _text_field(row, "id", where)
        yield key, {"text": _text_field(row, "text", where), "label": label, "id": key}


def _read_named_lines(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    """Yields papers from lines of JSON with a text and the name of its class."""
    name = {"train": "train_data.txt", "valid": "val_data.txt", "test": "test_data.txt"}[split]
    for index, (where, row) in enumerate(_read_rows(folder / name)):
        if row.get("label") not in ARXIV_CLASSES:
            raise ValueError(f"the class of {where} is {row.get('label')!r}, and must be one of {ARXIV_CLASSES}")
        key = f"{split}/{index}"
        text = _text_field(row, "text", where)
        yield key, {"text": text, "label": ARXIV_CLASSES.index(row["label"]), "id": key}


def _read_plain(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    path = folder / f"{split}.txt.xz"
    with limits.open_stream(path) as stream:
        yield split, {"text": limits.decode(stream.read(), path.name), "label": 0, "id": split}


def _read_wikitext(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    with limits.open_zip(folder / form.files[0].name) as archive:
        text = limits.read_zip_text(archive, f"wikitext-2/wiki.{split}.tokens")
    yield split, {"text": text, "label": 0, "id": split}


def _read_pack(form: Form, folder: pathlib.Path, split: SplitName) -> Examples:
    with limits.open_zip(folder / form.files[0].name) as pack:
        blob, offsets, labels, splits, names = (
            limits.read_array(pack, name) for name in ("blob", "off", "label", "split", "names")
        )
        # A pack may hold a part of the classes of its data set.
        classes = limits.read_array(pack, "classes") if "classes.npy" in pack.namelist() else None
    count = len(labels)
    if not len(splits) == len(names) == len(offsets) - 1 == count:
        raise ValueError(f"{count} labels, {len(splits)} splits, {len(names)} names and {len(offsets)} offsets")
    for field, array in (("off", offsets), ("label", labels), ("split", splits)):
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"its array {field} is {array.dtype}, and must have integers")
    offsets = offsets.astype(np.int64)
    if blob.dtype != np.uint8 or offsets[0] != 0 or offsets[-1] != len(blob) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{len(blob)} bytes and {count} labels do not fit its offsets")
    if (outside := np.flatnonzero((splits != 0) & (splits != 1))).size:
        raise ValueError(f"the split of {names[outside[0]]} is {splits[outside[0]]}, and must be 0 (train) or 1 (test)")
    for index in np.flatnonzero(splits == ("train", "test").index(split)):
        key, label = f"{index}/{names[index]}", int(labels[index])
        if classes is not None:
            check_label(label, len(classes), f"{key} in {form.files[0].name}")
        yield key, {"image": encode_image(blob[offsets[index] : offsets[index + 1]].tobytes(), key), "label": label}


Reader = Callable[[Form, pathlib.Path, SplitName], Examples]
READERS: dict[ReaderName, Reader] = {
    "idx": _read_idx,
    "reviews": _read_reviews,
    "lines": _read_lines,
    "named_lines": _read_named_lines,
    "plain": _read_plain,
    "wikitext": _read_wikitext,
    "pack": _read_pack,
    "oxford_pets": archives.read_pets,
    "flowers102": archives.read_flowers,
    "food101": archives.read_food,
    "tiny_imagenet": archives.read_tiny_imagenet,
}
