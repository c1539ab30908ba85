"""Files from elsewhere: labels out of range, names that occur twice, bombs, links and damaged contents are refused."""

import gzip
import io
import json
import lzma
import stat
import sys
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from experiments.engine.data import catalog, limits, manifest, papers, raw, reviews, store, sums
from experiments.engine.data.examples import ImageData
from experiments.engine.errors import EngineError
from tests.experiments.engine.data.raw_sets import (
    paper_text,
    unpublished,  # noqa: F401
    write_arxiv,
    write_fashion,
    write_imdb,
    write_pack,
)
from tests.experiments.engine.data.test_archives import flowers, food, image, pets, tiny, write_tar

pytestmark = pytest.mark.usefixtures("unpublished", "fresh")


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


# Labels


@pytest.mark.parametrize("label", [10**6, -7, 37, -1])
def test_labels_of_a_pack_outside_the_classes(tmp_path, label):
    write_pack(tmp_path, "oxford_pets")
    labels = np.zeros(8, np.int64)
    labels[2] = label
    path = tmp_path / "oxford_pets/oxford_pets.npz"
    change_pack(path, label=labels, classes=np.array([f"class{index}" for index in range(37)]))
    wanted = rf"the label of 2/image2 in oxford_pets.npz is {label}, and must be an integer from 0 to 36"
    refused(wanted, "oxford_pets", tmp_path)
    with np.load(path) as pack:
        arrays = dict(pack)
    del arrays["classes"]
    np.savez(path, **arrays)
    wanted = rf"the label of 2/image2 in the train split is {label}, and must be an integer from 0 to 36"
    refused(wanted, "oxford_pets", tmp_path)


def test_labels_of_a_pack_with_fewer_classes_than_the_set(tmp_path):
    write_pack(tmp_path, "food101")
    change_pack(tmp_path / "food101/food10.npz", label=np.full(8, 2))
    refused(r"the label of 0/image0 in food10.npz is 2, and must be an integer from 0 to 1", "food101", tmp_path)


def test_labels_of_idx_files_outside_the_classes(tmp_path):
    write_fashion(tmp_path)
    path = tmp_path / "fashion_mnist/train-labels-idx1-ubyte.gz"
    data = bytearray(gzip.decompress(path.read_bytes()))
    data[8 + 3] = 10
    path.write_bytes(gzip.compress(data))
    refused(
        r"the label of 00003 in the train split is 10, and must be an integer from 0 to 9", "fashion_mnist", tmp_path
    )


@pytest.mark.parametrize(("label", "shown"), [(-7, "-7"), (11, "11"), (0.7, "0.7"), (True, "True"), ("3", "'3'")])
def test_labels_of_papers_outside_the_classes(tmp_path, label, shown):
    write_arxiv(tmp_path, {"train": [(0, "a"), (label, "b")], "valid": [(0, "c")], "test": [(0, "d")]})
    wanted = rf"the label of line 2 of train.jsonl.xz is {shown}, and must be an integer from 0 to 10"
    refused(wanted, "arxiv11", tmp_path)


@pytest.mark.parametrize("label", [0, 38])
def test_labels_of_published_pets_outside_the_classes(tmp_path, label):
    pets(tmp_path)
    write_tar(tmp_path / "annotations.tar.gz", {"annotations/trainval.txt": f"cat_1 {label} 1 1\n".encode()})
    wanted = rf"the label of images/cat_1.jpg in the train split is {label - 1}, and must be an integer from 0 to 36"
    refused_archive(wanted, "oxford_pets", tmp_path)


@pytest.mark.parametrize("index", [0, 6, -1])
def test_flowers_that_do_not_exist(tmp_path, index):
    """The image 0 does not get the class of the last one."""
    flowers(tmp_path)
    savemat(tmp_path / "setid.mat", {"trnid": [[2, index]]})
    refused_archive(
        rf"setid.mat names the image {index}, and imagelabels.mat has the images 1 to 5", "flowers102", tmp_path
    )


def test_classes_that_are_not_listed(tmp_path):
    food(tmp_path)
    lists = {"classes": b"pie\n", "train": b"soup/7\n"}
    write_tar(tmp_path / "food-101.tar.gz", {f"food-101/meta/{name}.txt": data for name, data in lists.items()})
    refused_archive("train.txt names the class soup, which classes.txt does not list", "food101", tmp_path)
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr("tiny-imagenet-200/wnids.txt", "n2\n")
        archive.writestr("tiny-imagenet-200/train/n1/images/n1_0.JPEG", image(1))
    refused_archive("n1_0.JPEG has the class n1, which wnids.txt does not list", "tiny_imagenet", tmp_path)


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


# Modules that a prepared set names


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


# Limits of size


def test_a_tar_member_that_claims_a_tebibyte(tmp_path):
    pets(tmp_path)
    member = tarfile.TarInfo("images/other.jpg")
    member.size = 2**40
    (tmp_path / "images.tar.gz").write_bytes(gzip.compress(member.tobuf() + bytes(1024)))
    wanted = (
        r"images/other.jpg in images.tar.gz has 1,099,511,627,776 bytes unpacked, and at most 1,073,741,824 are read"
    )
    refused_archive(wanted, "oxford_pets", tmp_path)


def test_a_tar_header_that_claims_a_tebibyte(tmp_path, monkeypatch):
    """Headers with long names are read whole by tarfile before a member is seen."""
    monkeypatch.setattr(limits, "MEMBER_BYTES", 10_000)
    pets(tmp_path)
    member = tarfile.TarInfo("././@PaxHeader")
    member.type, member.size = tarfile.XHDTYPE, 2**40
    (tmp_path / "images.tar.gz").write_bytes(gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(20_000)))
    refused_archive(r"images.tar.gz has a part of more than 10,000 bytes", "oxford_pets", tmp_path)


def test_a_tar_of_too_many_bytes_or_members(tmp_path, monkeypatch):
    pets(tmp_path)
    write_tar(tmp_path / "images.tar.gz", {f"images/other_{index}.jpg": bytes(9000) for index in range(20)})
    with monkeypatch.context() as patch:
        patch.setattr(limits, "TOTAL_BYTES", 100_000)
        refused_archive(r"images.tar.gz unpacks to more than 100,000 bytes, which is the most", "oxford_pets", tmp_path)
    monkeypatch.setattr(limits, "MEMBER_COUNT", 10)
    refused_archive(r"images.tar.gz has more than 10 members", "oxford_pets", tmp_path)


def test_zip_bombs(tmp_path, monkeypatch):
    tiny(tmp_path)
    path = tmp_path / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny-imagenet-200/train/n1/images/n1_1.JPEG", bytes(500_000))
    with monkeypatch.context() as patch:
        patch.setattr(limits, "MEMBER_BYTES", 100_000)
        wanted = r"n1_1.JPEG in tiny-imagenet-200.zip has 500,000 bytes unpacked, and at most 100,000 are read"
        refused_archive(wanted, "tiny_imagenet", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "TOTAL_BYTES", 400_000)
        refused_archive(r"tiny-imagenet-200.zip unpacks to more than 400,000 bytes", "tiny_imagenet", tmp_path)
    monkeypatch.setattr(limits, "MEMBER_COUNT", 3)
    refused_archive(r"tiny-imagenet-200.zip has more than 3 members", "tiny_imagenet", tmp_path)


def test_packed_streams_of_too_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MEMBER_BYTES", 10_000)
    write_arxiv(tmp_path, {split: [(0, "a" * 20_000)] for split in ("train", "valid", "test")})
    refused(r"train.jsonl.xz has a part of more than 10,000 bytes", "arxiv11", tmp_path)
    (tmp_path / "wikitext2").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / f"wikitext2/{split}.txt.xz").write_bytes(lzma.compress(bytes(20_000)))
    refused(r"train.txt.xz has a part of more than 10,000 bytes", "wikitext2", tmp_path)
    write_fashion(tmp_path)
    path = tmp_path / "fashion_mnist/train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(20_000)))
    refused(r"train-images-idx3-ubyte.gz has a part of more than 10,000 bytes", "fashion_mnist", tmp_path)


def test_many_lines_of_too_many_bytes(tmp_path, monkeypatch):
    write_arxiv(tmp_path, {split: [(0, "a" * 900)] * 20 for split in ("train", "valid", "test")})
    monkeypatch.setattr(limits, "TOTAL_BYTES", 10_000)
    refused(r"train.jsonl.xz unpacks to more than 10,000 bytes, which is the most that is read", "arxiv11", tmp_path)


def npy(shape, dtype="|u1", data=b""):
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    header = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (npy((10**15,)), "is damaged"),  # as much memory as no machine has
        (npy((2,), "|O", b"\x80\x04N."), r"the array blob holds Python objects, which are not read"),
        (b"", "is damaged"),
        (b"\x93NUMPY\x09\x00", r"the array blob has the format version \(9, 0\)"),
    ],
    ids=["large", "pickle", "empty", "version"],
)
def test_arrays_that_are_not_what_their_headers_say(tmp_path, content, wanted):
    write_pack(tmp_path, "food101")
    path = tmp_path / "food101/food10.npz"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (members | {"blob.npy": content}).items():
            archive.writestr(name, data)
    refused(wanted, "food101", tmp_path)


def test_a_pack_of_too_many_bytes(tmp_path, monkeypatch):
    write_pack(tmp_path, "food101")
    monkeypatch.setattr(limits, "MEMBER_BYTES", 1000)
    refused(r"blob.npy in food10.npz has [\d,]+ bytes unpacked, and at most 1,000 are read", "food101", tmp_path)


def test_an_image_of_too_many_pixels(tmp_path):
    """Such a file is small, and takes gigabytes in memory."""
    buffer = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(buffer, "PNG")
    pets(tmp_path)
    write_tar(tmp_path / "images.tar.gz", {f"images/cat_{i}.jpg": buffer.getvalue() for i in (1, 3)})
    refused_archive(r"the image images/cat_1.jpg cannot be decoded: .* exceeds limit", "oxford_pets", tmp_path)


# Names in archives


def test_a_name_that_a_tar_has_twice(tmp_path):
    write_imdb(tmp_path, {("train", "pos"): ["good"], ("test", "neg"): ["bad"]})
    path = tmp_path / "imdb/aclImdb.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for text in (b"good", b"bad"):
            member = tarfile.TarInfo("aclImdb/train/pos/0_1.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    refused(r"aclImdb.tar.gz has two members with the name aclImdb/train/pos/0_1.txt\)", "imdb", tmp_path)
    write_tar(path, {"aclImdb/train/pos/0_1.txt": b"good", "other/train/pos/0_1.txt": b"bad"})
    refused(r"the train split has two examples with the name train/pos/0_1.txt\)", "imdb", tmp_path)


def test_a_name_that_a_zip_has_twice(tmp_path):
    tiny(tmp_path)
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "a") as archive, pytest.warns(UserWarning, match="Dupl"):
        archive.writestr("tiny-imagenet-200/train/n1/images/n1_0.JPEG", image(9))
    wanted = r"zip has two members with the name tiny-imagenet-200/train/n1/images/n1_0.JPEG"
    refused_archive(wanted, "tiny_imagenet", tmp_path)


def test_a_name_that_a_list_has_twice(tmp_path):
    pets(tmp_path)
    write_tar(tmp_path / "annotations.tar.gz", {"annotations/trainval.txt": b"cat_1 1 1 1\ncat_1 37 1 12\n"})
    refused_archive(r"annotations/trainval.txt names images/cat_1.jpg twice", "oxford_pets", tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
@pytest.mark.parametrize("target", ["/etc/hostname", "images/cat_1.jpg", "images/cat_3.jpg"])
def test_links_in_a_tar(tmp_path, kind, target):
    """A link leads out of the archive, to another member, or to itself."""
    pets(tmp_path)
    with tarfile.open(tmp_path / "images.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("images/cat_1.jpg")
        member.size = len(image(1))
        archive.addfile(member, io.BytesIO(image(1)))
        link = tarfile.TarInfo("images/cat_3.jpg")
        link.type, link.linkname = kind, target
        archive.addfile(link)
    refused_archive(r"images/cat_3.jpg in images.tar.gz is a link or a directory", "oxford_pets", tmp_path)


def test_links_in_a_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "wikitext-2-v1.zip", "w") as archive:
        link = zipfile.ZipInfo("wikitext-2/wiki.train.tokens")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/hostname")
    refused_archive(r"wiki.train.tokens in wikitext-2-v1.zip is a link or a directory", "wikitext2", tmp_path)


def test_absolute_names_in_a_tar(tmp_path):
    """They are members like others: nothing is written to disk, and the set lacks its images."""
    pets(tmp_path)
    outside = tmp_path / "outside.jpg"
    write_tar(tmp_path / "images.tar.gz", {str(outside): image(1), "../images/cat_1.jpg": image(1)})
    refused_archive(r"images.tar.gz has 0 of 2 images", "oxford_pets", tmp_path)
    assert not outside.exists()


# Damaged contents


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


def test_a_truncated_image_in_an_archive(tmp_path):
    """It is found when the set is prepared, not in training."""
    pets(tmp_path)
    write_tar(tmp_path / "images.tar.gz", {"images/cat_1.jpg": image(1), "images/cat_3.jpg": image(3)[:-40]})
    refused_archive(r"the image images/cat_3.jpg cannot be decoded: .*Truncated", "oxford_pets", tmp_path)


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
