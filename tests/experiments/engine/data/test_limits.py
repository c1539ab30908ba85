"""Limits of what is read: bombs of every packing are refused before they fill the memory."""

import gzip
import io
import lzma
import tarfile
import zipfile

import pytest
from PIL import Image

from experiments.engine.data import limits
from tests.experiments.engine.data.raw_sets import (
    unpublished,  # noqa: F401
    write_arxiv,
    write_fashion,
    write_pack,
)
from tests.experiments.engine.data.refusals import (
    fresh,  # noqa: F401
    refused,
    refused_archive,
)
from tests.experiments.engine.data.test_archives import pets, tiny, write_tar

pytestmark = pytest.mark.usefixtures("unpublished", "fresh")


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
    """A small compressed file that would unpack to gigabytes in memory is refused."""
    buffer = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(buffer, "PNG")
    pets(tmp_path)
    write_tar(tmp_path / "images.tar.gz", {f"images/cat_{i}.jpg": buffer.getvalue() for i in (1, 3)})
    refused_archive(r"the image images/cat_1.jpg cannot be decoded: .* exceeds limit", "oxford_pets", tmp_path)


def test_a_skip_beyond_the_limit_unpacks_nothing():
    stream = io.BytesIO(bytes(10))
    with pytest.raises(ValueError, match="file unpacks to more than"):
        limits.LimitedStream(stream, "file").seek(limits.TOTAL_BYTES + 1)
    assert stream.tell() == 0
