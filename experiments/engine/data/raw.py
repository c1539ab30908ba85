"""Raw files: whole or refused, and read example by example.

The forms are those in which the sets are published or handed on: idx files, a tar of reviews, lines of JSON, plain
text, alone or in a zip, and image packs (an .npz of JPEG files end to end).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import pathlib
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

from experiments.engine.data import archives
from experiments.engine.data.archives import Example
from experiments.engine.data.catalog import DataSet, Form, RawFile
from experiments.engine.errors import EngineError, one_line

SUMS = "SHA256SUMS"  # at the top of a data dir, as of `sha256sum`
# Of the published set of papers, in its order; a set of one's own has as many.
ARXIV_CLASSES = tuple("math.AC cs.CV cs.AI cs.SY math.GR cs.CE cs.PL cs.IT cs.DS cs.NE math.ST".split())  # noqa: SIM905
DAMAGED = (
    AssertionError,
    EOFError,
    OSError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def sha256_of(path: pathlib.Path) -> str:
    """The check sum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def readable_sum(path: pathlib.Path) -> str:
    """The check sum of a raw file; an EngineError where it cannot be read."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise EngineError(f"{path} cannot be read ({error.strerror}); give access to it") from error


def published_sum(file: RawFile, folder: pathlib.Path) -> str | None:
    """The check sum that a file must have: the published one, or that of SHA256SUMS; None where nobody tells."""
    if file.sha256 is not None:
        return file.sha256
    sums = folder.parent / SUMS
    if not sums.is_file():
        return None
    for line in sums.read_text().splitlines():
        digest, _, name = line.partition(" ")
        if name.lstrip(" *").removeprefix("./") == f"{folder.name}/{file.name}":
            return digest
    return None


def check(data_set: DataSet, form: Form, folder: pathlib.Path) -> dict[str, str]:
    """The check sums of the raw files of a form; refuses one that is not as published."""
    found = {}
    for file in form.files:
        path = folder / file.name
        found[file.name] = readable_sum(path)
        wanted = published_sum(file, folder)
        if wanted is not None and wanted != found[file.name]:
            raise EngineError(
                f"{path} is damaged (its SHA-256 is {found[file.name][:16]}..., it must be {wanted[:16]}...); "
                f"remove it, and get it again from {data_set.home}"
            )
    return found


def examples(data_set: DataSet, form: Form, folder: pathlib.Path, split: str) -> Iterator[tuple[str, Example]]:
    """The examples of a split with their keys; an EngineError where a file cannot be read to its end."""
    try:
        yield from READERS[form.reader](form, folder, split)
    except DAMAGED as error:
        raise EngineError(
            f"a raw file of {data_set.name} in {folder} is damaged ({one_line(error)}); remove it, and get "
            f"it again from {data_set.home}"
        ) from error


def _read_idx(form: Form, folder: pathlib.Path, split: str) -> Iterator[tuple[str, Example]]:
    start = {"train": "train", "test": "t10k"}[split]
    images = _idx(folder / f"{start}-images-idx3-ubyte.gz")
    labels = _idx(folder / f"{start}-labels-idx1-ubyte.gz")
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels")
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        yield f"{index:05d}", {"image": io.BytesIO(buffer.getvalue()), "label": int(label)}


def _idx(path: pathlib.Path) -> np.ndarray:
    with gzip.open(path) as file:
        data = file.read()
    _, kind, axes = struct.unpack(">HBB", data[:4])
    if kind != 8:
        raise ValueError(f"{path.name} is no idx file of bytes")
    shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _read_reviews(form: Form, folder: pathlib.Path, split: str) -> Iterator[tuple[str, Example]]:
    with tarfile.open(folder / form.files[0].name) as archive:
        for member in archive:
            parts = pathlib.PurePosixPath(member.name).parts
            if not member.isfile() or len(parts) != 4 or parts[1] != split or parts[2] not in ("neg", "pos"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            name = "/".join(parts[1:])
            yield name, {"text": file.read().decode(), "label": int(parts[2] == "pos"), "id": name}


def _read_lines(form: Form, folder: pathlib.Path, split: str) -> Iterator[tuple[str, Example]]:
    with lzma.open(folder / f"{split}.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in filter(str.strip, lines):
            row = json.loads(line)
            if row["label11"] >= len(ARXIV_CLASSES):
                raise ValueError(
                    f"label11 is {row['label11']} in {row['id']}, and there are {len(ARXIV_CLASSES)} classes"
                )
            if row["label11"] >= 0:  # The others have a class that is too rare.
                yield row["id"], {"text": row["text"], "label": int(row["label11"]), "id": row["id"]}


def _read_named_lines(form: Form, folder: pathlib.Path, split: str) -> Iterator[tuple[str, Example]]:
    """Lines of JSON with a text and the name of its class."""
    name = {"train": "train_data.txt", "valid": "val_data.txt", "test": "test_data.txt"}[split]
    with (folder / name).open(encoding="utf-8") as lines:
        for index, line in enumerate(filter(str.strip, lines)):
            row = json.loads(line)
            key = f"{split}/{index}"
            yield key, {"text": row["text"], "label": ARXIV_CLASSES.index(row["label"]), "id": key}


def _read_plain(form: Form, folder: pathlib.Path, split: str) -> Iterator[tuple[str, Example]]:
    with lzma.open(folder / f"{split}.txt.xz", "rt", encoding="utf-8") as file:
        yield split, {"text": file.read(), "label": 0, "id": split}


def _read_wikitext(form: Form, folder: pathlib.Path, split: str) -> Iterator[tuple[str, Example]]:
    with zipfile.ZipFile(folder / form.files[0].name) as archive:
        yield split, {"text": archive.read(f"wikitext-2/wiki.{split}.tokens").decode(), "label": 0, "id": split}


def _read_pack(form: Form, folder: pathlib.Path, split: str) -> Iterator[tuple[str, Example]]:
    with (folder / form.files[0].name).open("rb") as file, np.load(file) as pack:
        blob, offsets, labels, splits, names = (pack[name] for name in ("blob", "off", "label", "split", "names"))
    if offsets[-1] != len(blob) or len(offsets) != len(labels) + 1:
        raise ValueError(f"{len(blob)} bytes and {len(labels)} labels do not fit its offsets")
    for index in np.flatnonzero(splits == ("train", "test").index(split)):
        data = blob[offsets[index] : offsets[index + 1]].tobytes()
        Image.open(io.BytesIO(data)).load()  # One that cannot be decoded is found here, and not in training.
        yield f"{index}/{names[index]}", {"image": io.BytesIO(data), "label": int(labels[index])}


Reader = Callable[[Form, pathlib.Path, str], Iterator[tuple[str, Example]]]
READERS: dict[str, Reader] = {
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
