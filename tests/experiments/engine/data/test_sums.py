"""Check sums and addresses: every download is over https, and is what it was before."""

import hashlib
import json

import pytest

from experiments.engine.data import catalog, download, limits, store, sums
from experiments.engine.errors import EngineError
from tests.experiments.engine.data.raw_sets import unpublished, write_pack  # noqa: F401

# Files without a published sum. Their sums are recorded at the first download.
WITHOUT_SUMS = {"train_data.txt", "val_data.txt", "test_data.txt"}


@pytest.mark.parametrize("data_set", catalog.DATA_SETS.values(), ids=catalog.DATA_SETS)
def test_published_files_are_on_https_and_have_a_sum(data_set):
    for file in data_set.forms[-1].files:
        assert file.url.startswith("https://")
        if file.name in WITHOUT_SUMS:
            assert file.sha256 is None
        else:
            assert len(bytes.fromhex(file.sha256)) == 32
    assert "http://" not in data_set.home


@pytest.mark.parametrize("name", ["imagelabels.mat", "setid.mat"])
def test_matlab_files_are_checked_before_they_are_read(tmp_path, monkeypatch, name):
    """SciPy crashes the process on some damaged ones."""
    (tmp_path / "flowers102").mkdir()
    for file in catalog.find("flowers102").forms[-1].files:
        (tmp_path / "flowers102" / file.name).write_bytes(b"damaged")
    digests = {"102flowers.tgz": 0, "imagelabels.mat": 0, "setid.mat": 0, name: 1}
    known = {file: catalog._SUMS[file] if not wrong else "0" * 64 for file, wrong in digests.items()}
    monkeypatch.setattr(sums, "sha256_of", lambda path: known[path.name])
    monkeypatch.setattr("scipy.io.loadmat", lambda path: pytest.fail("a damaged file is read"))
    refused(rf"{name} is damaged \(its SHA-256 is 0000000000000000..., it must be", tmp_path, "flowers102")


class Response:
    """The response of a server."""

    def __init__(self, data, url, headers=None):
        self.data, self.url, self.headers = data, url, headers or {}

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def read(self, count):
        data, self.data = self.data[:count], self.data[count:]
        return data


PAPERS = {
    f"{name}_data.txt": "\n".join(json.dumps({"text": f"{name} {i}", "label": "cs.CV"}) for i in range(3)).encode()
    for name in ("train", "val", "test")
}


@pytest.fixture
def server(monkeypatch):
    """Files by name, which a test may change."""
    files = dict(PAPERS)
    monkeypatch.setattr(
        download.urllib.request, "urlopen", lambda url, timeout: Response(files[url.rsplit("/")[-1]], url)
    )
    store._open.cache_clear()
    return files


def refused(message, data_dir, name="arxiv11"):
    store._open.cache_clear()
    with pytest.raises(EngineError, match=message) as caught:
        store.open_split(name, "train", data_dir)
    assert "\n" not in str(caught.value)


def test_the_sum_of_a_first_download_is_recorded(tmp_path, server, capsys):
    assert len(store.open_split("arxiv11", "train", tmp_path)) == 3
    record = tmp_path / "arxiv11/train_data.txt.sha256"
    assert record.read_text() == f"{hashlib.sha256(PAPERS['train_data.txt']).hexdigest()}  train_data.txt\n"
    assert f"that of this download is recorded in {record}, and another file is refused" in capsys.readouterr().err


def test_another_download_than_the_first_is_refused(tmp_path, server):
    store.open_split("arxiv11", "train", tmp_path)
    for path in (tmp_path / "prepared/arxiv11/1.0.0").iterdir():
        path.unlink()
    (tmp_path / "prepared/arxiv11/1.0.0").rmdir()
    path = tmp_path / "arxiv11/train_data.txt"
    path.unlink()
    server["train_data.txt"] += b"\n" + server["test_data.txt"]
    wanted = r"train_data.txt is not the file that was first downloaded \(.*\); put .* or remove .*txt.sha256 to accept"
    refused(wanted, tmp_path)
    sums.record_of(path).unlink()
    store._open.cache_clear()
    assert len(store.open_split("arxiv11", "train", tmp_path)) == 6


def test_a_listed_sum_goes_before_a_recorded_one(tmp_path, server):
    lines = [f"{hashlib.sha256(data).hexdigest()}  arxiv11/{name}\n" for name, data in PAPERS.items()]
    (tmp_path / sums.SUMS).write_text("".join(lines))
    assert len(store.open_split("arxiv11", "train", tmp_path)) == 3
    assert not list((tmp_path / "arxiv11").glob(f"*{sums.RECORD}"))


def test_a_redirection_to_http_is_refused(tmp_path, monkeypatch):
    data = PAPERS["train_data.txt"]
    monkeypatch.setattr(
        download.urllib.request, "urlopen", lambda url, timeout: Response(data, "http://a.mirror/train_data.txt")
    )
    refused(r"cannot be reached \(it leads to http://a.mirror/train_data.txt, which is not https\)", tmp_path)
    assert [path.name for path in (tmp_path / "arxiv11").iterdir()] == [".lock"]


def test_a_download_without_an_end_is_refused(tmp_path, server, monkeypatch):
    monkeypatch.setattr(limits, "TOTAL_BYTES", 50)
    refused(r"train_data.txt cannot be reached \(it sends more than 50 bytes\)", tmp_path)
    assert [path.name for path in (tmp_path / "arxiv11").iterdir()] == [".lock"]


def test_a_length_that_is_no_number(tmp_path, monkeypatch):
    monkeypatch.setattr(
        download.urllib.request,
        "urlopen",
        lambda url, timeout: Response(PAPERS[url.rsplit("/")[-1]], url, {"Content-Length": "many"}),
    )
    store._open.cache_clear()
    assert len(store.open_split("arxiv11", "train", tmp_path)) == 3


@pytest.mark.usefixtures("unpublished")
def test_lists_of_sums_in_other_shapes(tmp_path):
    write_pack(tmp_path, "food101")
    path = tmp_path / "food101/food10.npz"
    listed = tmp_path / sums.SUMS
    listed.write_bytes(b"\xff\xfe\x00")
    refused(r"SHA256SUMS cannot be read \(it is not UTF-8 text\); write it by sha256sum", tmp_path, "food101")
    listed.write_text(f"{sums.sha256_of(path).upper()}  food101/food10.npz\n")
    store._open.cache_clear()
    assert len(store.open_split("food101", "train", tmp_path)) == 6
