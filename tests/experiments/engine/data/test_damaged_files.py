"""Damaged raw files are refused in one sentence, or read as they are meant."""

import gzip
import io
import lzma

import numpy as np
import pytest
from PIL import Image

from experiments.engine.data import catalog, raw, store
from tests.experiments.engine.data.raw_sets import (
    paper_text,
    unpublished,  # noqa: F401
    write_arxiv,
    write_fashion,
    write_imdb,
    write_pack,
)
from tests.experiments.engine.data.refusals import (
    change_pack,
    fresh,  # noqa: F401
    refused,
    refused_archive,
)
from tests.experiments.engine.data.test_archives import food, image, pets, write_tar

pytestmark = pytest.mark.usefixtures("unpublished", "fresh")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b'{"id": "2", "label11": 0, "text": "b"', r"line 2 of train.jsonl.xz is not JSON"),
        (b'["2", 0, "b"]', r"line 2 of train.jsonl.xz is not a JSON object"),
        (b'{"id": "2", "label11": 0, "text": "\xff"}', r"line 2 of train.jsonl.xz is not UTF-8 text \(.* at byte 35\)"),
        (b'{"id": "2", "label11": 0, "text": null}', r"line 2 of train.jsonl.xz has no text in its field 'text'"),
        (b'{"id": 2, "label11": 0, "text": "b"}', r"line 2 of train.jsonl.xz has no text in its field 'id'"),
        (b'{"id": "2", "label11": 0, "text": "\\ud800"}', r"line 2 of train.jsonl.xz has half of a surrogate pair"),
        (b'{"label11": 0, "text": "b"}', r"line 2 of train.jsonl.xz has no text in its field 'id'"),
        (b'{"id": "2", "text": "b"}', r"the label of line 2 of train.jsonl.xz is None"),
        (b"[" * 100_000, r"a raw file of arxiv11 in .* is damaged"),
        ('{"id": "2", "label11": 0, "text": "b"}'.encode("utf-16"), r"line 2 of train.jsonl.xz is not UTF-8 text"),
    ],
)
def test_damaged_lines(tmp_path, line, wanted):
    write_arxiv(tmp_path, {split: [(0, "a")] for split in ("train", "valid", "test")})
    good = b'{"id": "1", "label11": 0, "text": "a"}\n'
    (tmp_path / "arxiv11/train.jsonl.xz").write_bytes(lzma.compress(good + line))
    refused(wanted, "arxiv11", tmp_path)


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "zeros"])
@pytest.mark.parametrize("name", ["food101", "arxiv11", "imdb", "fashion_mnist"])
def test_damaged_files(tmp_path, name, damage):
    write_pack(tmp_path, "food101")
    write_arxiv(tmp_path, {split: [(0, paper_text(1, 0))] for split in ("train", "valid", "test")})
    write_imdb(tmp_path, {("train", "pos"): [paper_text(2, 0)], ("test", "neg"): [paper_text(3, 0)]})
    write_fashion(tmp_path)
    path = tmp_path / name / catalog.find(name).forms[0].files[0].name
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        for place in range(len(data) // 3, len(data) // 3 + 20):
            data[place] ^= 0x55
    path.write_bytes(
        {"empty": b"", "short": data[: len(data) // 2], "flipped": data, "zeros": bytes(len(data))}[damage]
    )
    refused(rf"{name} .*(is damaged|cannot be prepared)", name, tmp_path)


def test_one_wrong_byte_in_a_tar(tmp_path):
    """The sum of a packed file is at its very end, after the end of the tar."""
    write_imdb(tmp_path, {("train", "pos"): ["good"], ("test", "neg"): ["sad"]})
    path = tmp_path / "imdb/aclImdb.tar.gz"
    data = gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=0)
    assert data.count(b"good") == 1
    path.write_bytes(data.replace(b"good", b"food"))
    refused(r"a raw file of imdb in .* is damaged \(CRC check failed", "imdb", tmp_path)


def test_a_truncated_image_in_an_archive(tmp_path):
    """It is found when the set is prepared, not in training."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(256, size=(90, 90, 3), dtype=np.uint8)).save(buffer, "JPEG")
    half = buffer.getvalue()[: len(buffer.getvalue()) // 2]
    pets(tmp_path)
    write_tar(tmp_path / "images.tar.gz", {"images/cat_1.jpg": image(1), "images/cat_3.jpg": half})
    refused_archive(r"the image images/cat_3.jpg cannot be decoded: image file is truncated", "oxford_pets", tmp_path)


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK", "L"])
def test_images_of_other_kinds_in_a_pack_become_colours(tmp_path, mode):
    write_pack(tmp_path, "food101", count=4)
    buffer = io.BytesIO()
    Image.new("RGB", (9, 9), (204, 51, 51)).convert(mode).save(buffer, "JPEG" if mode == "CMYK" else "PNG")
    blob = np.frombuffer(buffer.getvalue(), np.uint8)
    change_pack(tmp_path / "food101/food10.npz", blob=np.tile(blob, 4), off=np.arange(5) * len(blob))
    found = store.open_split("food101", "train", tmp_path)[0]["image"]
    assert found.shape == (9, 9, 3)
    wanted = (97, 97, 97) if mode == "L" else (204, 51, 51)
    assert np.abs(found[4, 4].astype(int) - wanted).max() <= 10


@pytest.mark.parametrize(
    ("arrays", "wanted"),
    [
        ({"split": np.full(8, 2)}, r"the split of image0 is 2, and must be 0 \(train\) or 1 \(test\)"),
        ({"split": np.zeros(7, int)}, r"8 labels, 7 splits, 8 names and 9 offsets"),
        ({"names": np.array(["a"])}, r"8 labels, 8 splits, 1 names and 9 offsets"),
        ({"label": np.zeros(8)}, r"its array label is float64, and must have integers"),
        ({"off": np.zeros(9, int)}, r"do not fit its offsets"),
        ({"blob": np.zeros(8)}, r"do not fit its offsets"),
    ],
)
def test_arrays_of_a_pack_that_do_not_fit(tmp_path, arrays, wanted):
    write_pack(tmp_path, "food101")
    change_pack(tmp_path / "food101/food10.npz", **arrays)
    refused(wanted, "food101", tmp_path)


def test_offsets_that_go_back(tmp_path):
    write_pack(tmp_path, "food101")
    path = tmp_path / "food101/food10.npz"
    with np.load(path) as pack:
        offsets = pack["off"].astype(np.uint64)
    offsets[[1, 2]] = offsets[[2, 1]]
    change_pack(path, off=offsets)
    refused(r"do not fit its offsets", "food101", tmp_path)


def test_idx_files_whose_header_does_not_fit(tmp_path):
    write_fashion(tmp_path)
    path = tmp_path / "fashion_mnist/train-images-idx3-ubyte.gz"
    data = bytearray(gzip.decompress(path.read_bytes()))
    data[4:8] = (2**31).to_bytes(4, "big")
    path.write_bytes(gzip.compress(data))
    wanted = r"train-images-idx3-ubyte.gz has 9408 values, and its header says 2147483648 x 28 x 28"
    refused(wanted, "fashion_mnist", tmp_path)
    path.write_bytes((tmp_path / "fashion_mnist/train-labels-idx1-ubyte.gz").read_bytes())
    refused(r"train-images-idx3-ubyte.gz is no idx file of bytes with 3 axes", "fashion_mnist", tmp_path)


def test_reviews_that_are_not_text(tmp_path):
    write_imdb(tmp_path, {("train", "pos"): ["good"]})
    write_tar(tmp_path / "imdb/aclImdb.tar.gz", {"aclImdb/train/pos/0_1.txt": b"caf\xe9"})
    refused(r"0_1.txt in aclImdb.tar.gz is not UTF-8 text \(.* at byte 3\)", "imdb", tmp_path)


def test_lists_with_windows_line_ends(tmp_path):
    food(tmp_path)
    files = {f"food-101/images/{name}.jpg": image(1) for name in ("pie/7", "soup/7")}
    lists = {"classes": b"pie\r\nsoup\r\n", "train": b"soup/7\r\npie/7\r\n"}
    write_tar(tmp_path / "food-101.tar.gz", files | {f"food-101/meta/{name}.txt": data for name, data in lists.items()})
    data_set = catalog.find("food101")
    found = {key: e["label"] for key, e in raw.examples(data_set, data_set.forms[-1], tmp_path, "train")}
    assert found == {"food-101/images/pie/7.jpg": 0, "food-101/images/soup/7.jpg": 1}
