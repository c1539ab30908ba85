"""Data sets are found, prepared once, whole or refused, each refusal one sentence."""

import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import urllib.error

import numpy as np
import pytest

from experiments.engine.data import catalog, disk, download, manifest, raw, store, sums
from experiments.engine.errors import EngineError
from tests.experiments.engine.data.raw_sets import (
    FASHION_COUNTS,
    fashion_images,
    needs_real_data,
    real,
    unpublished,  # noqa: F401
    write_arxiv,
    write_fashion,
    write_imdb,
    write_pack,
)

pytestmark = pytest.mark.usefixtures("unpublished", "fresh")
PACK = "food101"


@pytest.fixture
def fresh():
    """No set that another test has opened."""
    store._open.cache_clear()


@pytest.fixture
def pack_dir(tmp_path):
    write_pack(tmp_path, PACK)
    return tmp_path


def prepared(data_dir, name=PACK):
    return data_dir / "prepared" / name / catalog.find(name).version


def test_idx_files_are_read_bit_by_bit(tmp_path):
    write_fashion(tmp_path)
    for split, count in FASHION_COUNTS.items():
        source = store.open_split("fashion_mnist", split, tmp_path)
        assert len(source) == count
        found = {(source[i]["image"].tobytes(), int(source[i]["label"])) for i in range(count)}
        assert found == {(image.tobytes(), index % 10) for index, image in enumerate(fashion_images(split))}


def test_reviews_papers_and_packs_are_read(tmp_path):
    write_imdb(tmp_path, {("train", "pos"): ["good"], ("train", "neg"): ["bad", "worse"], ("test", "neg"): ["sad"]})
    write_arxiv(tmp_path, {"train": [(0, "a"), (-1, "rare"), (3, "b")], "valid": [(1, "c")], "test": [(2, "d")]})
    write_pack(tmp_path, PACK)
    reviews = store.open_split("imdb", "train", tmp_path)
    assert {(e["text"], int(e["label"])) for e in (reviews[i] for i in range(3))} == {
        (b"good", 1),
        (b"bad", 0),
        (b"worse", 0),
    }
    papers = store.open_split("arxiv11", "train", tmp_path)
    assert {(e["text"], int(e["label"])) for e in (papers[i] for i in range(len(papers)))} == {(b"a", 0), (b"b", 3)}
    images = store.open_split(PACK, "test", tmp_path)
    assert len(images) == 2
    assert images[0]["image"].shape == (40, 50, 3)


def test_a_prepared_set_needs_its_raw_files_no_more(pack_dir):
    before = [store.open_split(PACK, "train", pack_dir)[index]["label"] for index in range(6)]
    shutil.rmtree(pack_dir / PACK)
    store._open.cache_clear()
    assert [store.open_split(PACK, "train", pack_dir)[index]["label"] for index in range(6)] == before


def test_prepared_sets_may_lie_elsewhere(pack_dir, tmp_path, monkeypatch):
    monkeypatch.setenv(store.PREPARED_DIR, str(tmp_path / "elsewhere"))
    monkeypatch.setenv(store.DATA_DIR, str(pack_dir))
    assert len(store.open_split(PACK, "train")) == 6
    assert (tmp_path / "elsewhere" / PACK).is_dir()
    assert not (pack_dir / "prepared").exists()


def test_what_the_data_dir_has_prepared_comes_first(pack_dir, tmp_path, monkeypatch):
    store.open_split(PACK, "train", pack_dir)
    write_pack(tmp_path / "other", PACK, count=16)
    monkeypatch.setenv(store.PREPARED_DIR, str(tmp_path / "elsewhere"))
    assert len(store.open_split(PACK, "train", tmp_path / "other")) == 12
    store._open.cache_clear()
    assert len(store.open_split(PACK, "train", pack_dir)) == 6


def test_two_processes_prepare_a_set_once(pack_dir):
    program = f"from experiments.engine.data.store import open_split; print(len(open_split({PACK!r}, 'train')))"
    environment = os.environ | {store.DATA_DIR: str(pack_dir)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in outputs] == ["6\n", "6\n"]
    assert sum(error.count("preparing food101") for _, error in outputs) == 1


def refused(message, name=PACK, split="train", *, data_dir):
    store._open.cache_clear()
    with pytest.raises(EngineError, match=message) as caught:
        store.open_split(name, split, data_dir)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_network")
def test_a_missing_set_says_where_to_get_it(tmp_path):
    wanted = (
        r"arxiv11 cannot be found: .*/arxiv11/train_data.txt is not there, and https://huggingface.co/datasets/ccdv/.* "
        r"cannot be reached \(no route to host\); get it from https://huggingface.co/datasets/ccdv"
    )
    refused(wanted, "arxiv11", data_dir=tmp_path)
    shutil.rmtree(tmp_path / "arxiv11")
    write_arxiv(tmp_path, {"train": [(0, "a")], "test": [(0, "b")]})
    refused(r"arxiv11/valid.jsonl.xz is not there", "arxiv11", data_dir=tmp_path)
    refused("'mnist' is no data set; use one of fashion_mnist, imdb", "mnist", data_dir=tmp_path)
    refused("food101 has no split 'valid'; use one of train, test", split="valid", data_dir=tmp_path)


@pytest.fixture
def no_network(monkeypatch):
    def unreachable(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(download.urllib.request, "urlopen", unreachable)


@pytest.mark.usefixtures("no_network")
def test_without_a_network(tmp_path):
    refused(r"imdb cannot be found: .* cannot be reached \(no route to host\); get it from", "imdb", data_dir=tmp_path)
    assert [path.name for path in (tmp_path / "imdb").iterdir()] == [".lock"]


class Response:
    """What a server sends: all of it, or less than it has said."""

    url = "https://a.mirror/file"

    def __init__(self, data, size):
        self.data, self.headers = data, {"Content-Length": str(size)}

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def read(self, count):
        data, self.data = self.data[:count], self.data[count:]
        return data


def test_a_set_is_loaded_from_its_home(tmp_path, monkeypatch):
    write_imdb(tmp_path / "home", {("train", "pos"): ["good"], ("test", "neg"): ["bad"]})
    data = (tmp_path / "home/imdb/aclImdb.tar.gz").read_bytes()
    monkeypatch.setattr(download.urllib.request, "urlopen", lambda url, timeout: Response(data[:-5], len(data)))
    refused("it ended after", "imdb", data_dir=tmp_path)
    assert [path.name for path in (tmp_path / "imdb").iterdir()] == [".lock"]
    monkeypatch.setattr(download.urllib.request, "urlopen", lambda url, timeout: Response(data, len(data)))
    assert store.open_split("imdb", "train", tmp_path)[0]["text"] == b"good"


def test_a_damaged_raw_file(pack_dir):
    path = pack_dir / PACK / "food10.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(r"a raw file of food101 in .* is damaged \(.*\); remove it, and get it again from", data_dir=pack_dir)
    assert not prepared(pack_dir).exists()
    assert not list((pack_dir / "prepared").glob(f"*{disk.PARTIAL}"))
    path.write_bytes(whole)
    assert len(store.open_split(PACK, "train", pack_dir)) == 6


def test_images_that_cannot_be_decoded(pack_dir):
    path = pack_dir / PACK / "food10.npz"
    with np.load(path) as pack:
        arrays = dict(pack)
    np.savez(path, **arrays | {"blob": np.zeros_like(arrays["blob"])})
    refused(
        r"a raw file of food101 in .* is damaged \(the image 0/image0 has a format that is not known", data_dir=pack_dir
    )


def test_raw_files_that_are_not_what_they_should_be(tmp_path):
    write_imdb(tmp_path, {("train", "pos"): ["good"]})
    refused(r"imdb cannot be prepared from .* \(.*\); if the raw files are damaged", "imdb", data_dir=tmp_path)
    write_arxiv(tmp_path, {"train": [(0, "a")], "valid": [(None, "b")], "test": [(0, "c")]})
    refused(r"a raw file of arxiv11 in .* is damaged", "arxiv11", data_dir=tmp_path)
    lines = '{"id": "1", "label11": 0, "text": "a"}\n{"id": "1", "label11": 0, "text": "b"}'
    for split in ("train", "valid", "test"):
        (tmp_path / f"arxiv11/{split}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    refused(r"arxiv11 .* is damaged \(the train split has two examples with the name 1\)", "arxiv11", data_dir=tmp_path)
    assert not list((tmp_path / "prepared").glob("*/*"))


def test_a_set_of_other_raw_files(pack_dir):
    """A part of a set is not taken for all of it."""
    store.open_split(PACK, "train", pack_dir)
    (pack_dir / PACK / "food10.npz").rename(pack_dir / PACK / "food-101.tar.gz")
    refused(r"was prepared from food10.npz, and .*food101 has food-101.tar.gz; remove the dir", data_dir=pack_dir)


def test_raw_files_that_have_changed(pack_dir):
    store.open_split(PACK, "train", pack_dir)
    shutil.rmtree(pack_dir / PACK)
    write_pack(pack_dir, PACK, count=16)
    refused(r"was prepared from another food10.npz than is in .*food101; remove the directory", data_dir=pack_dir)
    shutil.rmtree(prepared(pack_dir))
    assert len(store.open_split(PACK, "train", pack_dir)) == 12


def test_the_whole_set_goes_before_a_part(pack_dir):
    (pack_dir / PACK / "food-101.tar.gz").write_bytes(b"no archive")
    refused(r"a raw file of food101 in .* is damaged", data_dir=pack_dir)


def test_any_process_can_prepare_a_set(pack_dir, monkeypatch):
    """One that is not the main one, too, whose disk may be its own."""
    monkeypatch.setattr("experiments.engine.workdir.is_main_process", lambda: False)
    assert len(store.open_split(PACK, "train", pack_dir)) == 6


def test_without_locks_the_first_to_end_is_taken(pack_dir, monkeypatch):
    """Another process prepares the set while this one does."""
    from experiments.engine.data import builder

    build = builder.build

    def no_locks(*args):
        raise OSError(37, "No locks available")

    def overtaken(data_set, form, folder, directory):
        built = build(data_set, form, folder, directory)
        monkeypatch.setattr(builder, "build", build)
        store.prepare(data_set, pack_dir, pack_dir / "prepared")
        return built

    monkeypatch.setattr(disk.fcntl, "flock", no_locks)
    monkeypatch.setattr(builder, "build", overtaken)
    assert len(store.open_split(PACK, "train", pack_dir)) == 6
    assert not list((pack_dir / "prepared").glob(f".*{disk.PARTIAL}"))


def test_check_sums_of_raw_files(pack_dir):
    data = (pack_dir / PACK / "food10.npz").read_bytes()
    listed = pack_dir / sums.SUMS
    listed.write_text(f"{'0' * 64}  ./{PACK}/food10.npz\n")
    refused(r"food10.npz is damaged \(its SHA-256 is .*, it must be 0000", data_dir=pack_dir)
    listed.write_text(f"{hashlib.sha256(data).hexdigest()} *./{PACK}/food10.npz\n")
    assert len(store.open_split(PACK, "train", pack_dir)) == 6


def test_what_was_killed_is_not_taken_for_whole(pack_dir, monkeypatch):
    """Whenever preparation ends early, the set is not there; the next one starts anew and cleans up."""

    def killed(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.pathlib.Path, "rename", killed)
        patch.setattr(store.shutil, "rmtree", lambda *args, **kwargs: None)  # as after SIGKILL
        with pytest.raises(KeyboardInterrupt):
            store.open_split(PACK, "train", pack_dir)
    assert not prepared(pack_dir).exists()
    assert list((pack_dir / "prepared").glob(f".*{disk.PARTIAL}"))
    assert len(store.open_split(PACK, "train", pack_dir)) == 6
    assert not list((pack_dir / "prepared").glob(f".*{disk.PARTIAL}"))


def test_a_damaged_prepared_set(pack_dir):
    store.open_split(PACK, "train", pack_dir)
    directory = prepared(pack_dir)
    listed = directory / manifest.MANIFEST
    record = next(path for path in directory.iterdir() if "array_record" in path.name)
    whole = record.read_bytes()
    record.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(r"array_record.* is damaged; remove the directory, and it is prepared anew", data_dir=pack_dir)
    record.unlink()
    refused(r"array_record.* is missing; remove the directory", data_dir=pack_dir)
    for content in ("{", "[]", '{"files": []}', '{"files": {}, "raw": {}, "name": "food101", "version": "1.0.0"}'):
        listed.write_text(content)
        refused(r"checksums.json is damaged \(.*\); remove the directory", data_dir=pack_dir)
    listed.unlink()
    refused(r"is not complete \(it has no .*\); remove the directory", data_dir=pack_dir)


@pytest.mark.usefixtures("no_network")
def test_a_set_of_an_older_version(pack_dir, capsys):
    store.open_split(PACK, "train", pack_dir)
    prepared(pack_dir).rename(prepared(pack_dir).with_name("0.9.0"))
    store._open.cache_clear()
    assert len(store.open_split(PACK, "train", pack_dir)) == 6  # made anew of the raw files
    assert "food101 was prepared by version 0.9.0, and 1.0.0 is needed" in capsys.readouterr().err
    shutil.rmtree(prepared(pack_dir))
    shutil.rmtree(pack_dir / PACK)
    refused(r"it was prepared by version 0.9.0 and 1.0.0 is needed, for which .*food-101.tar.gz", data_dir=pack_dir)


def test_directories_that_cannot_be_written(pack_dir, monkeypatch):
    pack_dir.chmod(0o555)
    refused(r"cannot be written to, and food101 has to be prepared; .* set ELSAA_PREPARED_DIR", data_dir=pack_dir)
    monkeypatch.setenv(store.PREPARED_DIR, str(pack_dir.parent / f"{pack_dir.name}_prepared"))
    refused(r"imdb cannot be found: .* cannot be written to, so it is not downloaded; get", "imdb", data_dir=pack_dir)
    monkeypatch.delenv(store.PREPARED_DIR)
    pack_dir.chmod(0o755)
    (pack_dir / "prepared").write_text("a file")
    refused(r"prepared cannot be used for data \(.*\); give a --data-dir that can", data_dir=pack_dir)


def test_a_full_disk(pack_dir, monkeypatch):
    from experiments.engine.data import builder

    def full(*args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(builder, "build", full)
    refused(r"data cannot be written to .* \(No space left on device\); make room", data_dir=pack_dir)

    def full_of_records(*args):
        raise RuntimeError("Failed to finalize writing: No space left on device")

    monkeypatch.setattr(builder, "build", full_of_records)
    refused(r"food101 cannot be prepared from .* \(.*No space left on device\)", data_dir=pack_dir)
    assert not prepared(pack_dir).exists()


def test_the_manifest_names_what_the_set_was_made_of(pack_dir):
    store.open_split(PACK, "train", pack_dir)
    written = json.loads((prepared(pack_dir) / manifest.MANIFEST).read_text())
    assert written["raw"] == {"food10.npz": sums.sha256_of(pack_dir / PACK / "food10.npz")}
    assert written["version"] == "1.0.0"


@needs_real_data
@pytest.mark.parametrize(
    ("name", "counts", "classes"),
    [
        ("fashion_mnist", (60_000, 10_000), 10),
        ("flowers102", (1020, 1020), 102),
        ("food101", (1000, 300), 10),
        ("oxford_pets", (3680, 3669), 37),
        ("tiny_imagenet", (10_000, 2000), 200),
    ],
)
def test_published_splits_of_images(name, counts, classes):
    """Labels and splits as published, and no image is in both."""
    data_set, folder = catalog.find(name), real(name)
    sums.check(data_set, data_set.forms[0], folder)
    hashes = []
    for split, count in zip(data_set.splits, counts, strict=True):
        examples = [example for _, example in raw.examples(data_set, data_set.forms[0], folder, split)]
        assert len(examples) == count
        assert {example["label"] for example in examples} == set(range(classes))
        hashes.append({hashlib.sha256(example["image"].getvalue()).digest() for example in examples})
    assert not hashes[0] & hashes[1]
