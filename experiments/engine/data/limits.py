"""Bounded reading of files that come from elsewhere: a small archive can unpack to far more than memory or disk hold.

Every reader of raw files goes through this module. Nothing is unpacked to disk, so the names inside an archive are
never used as paths. A file that exceeds a limit is refused with a ValueError.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import pathlib
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, cast

import numpy as np

# The largest published file unpacks to about 5 GB (food-101.tar.gz), and its largest member to less than 1 MB. The
# largest single array is the image pack of Oxford Pets, with about 53 MB.
MEMBER_BYTES = 2**30  # one member, one line or one array
TOTAL_BYTES = 2**34  # one file, unpacked
MEMBER_COUNT = 1_000_000  # members of one archive
CHUNK = 2**20


def check_member_size(size: int, name: str) -> None:
    """Refuses a member that is larger than MEMBER_BYTES."""
    if size > MEMBER_BYTES:
        raise ValueError(f"{name} has {size:,} bytes unpacked, and at most {MEMBER_BYTES:,} are read")


def check_total_size(size: int, name: str) -> None:
    """Refuses a file that unpacks to more than TOTAL_BYTES."""
    if size > TOTAL_BYTES:
        raise ValueError(f"{name} unpacks to more than {TOTAL_BYTES:,} bytes, which is the most that is read")


class LimitedStream:
    """A binary stream that refuses to be read beyond the limits.

    It has the methods that `tarfile` needs, so the headers of a tar are bounded as well.
    """

    def __init__(self, stream: IO[bytes], name: str) -> None:
        """Wraps a stream.

        Args:
          stream: Unpacked bytes of a file.
          name: Name of the file, for messages.
        """
        self._stream = stream
        self._name = name

    def read(self, size: int = -1) -> bytes:
        """Returns the next `size` bytes, or all that are left when `size` is negative."""
        data = self._stream.read(min(size, MEMBER_BYTES + 1) if size >= 0 else MEMBER_BYTES + 1)
        self._check(data)
        return data

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yields the number (from 1) and the text of each line that is not blank."""
        number = 0
        while line := self._stream.readline(MEMBER_BYTES + 1):
            self._check(line)
            number += 1
            if line.strip():
                yield number, decode(line, f"line {number} of {self._name}")

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a position from the start of the stream."""
        if whence != io.SEEK_SET:
            raise ValueError("a limited stream moves to positions from its start only")
        check_total_size(offset, self._name)
        return self._stream.seek(offset)

    def tell(self) -> int:
        """Returns the position in the stream."""
        return self._stream.tell()

    def _check(self, data: bytes) -> None:
        if len(data) > MEMBER_BYTES:
            raise ValueError(
                f"{self._name} has a part of more than {MEMBER_BYTES:,} bytes, which is the most that is read"
            )
        check_total_size(self._stream.tell(), self._name)


@contextlib.contextmanager
def open_stream(path: pathlib.Path) -> Iterator[LimitedStream]:
    """Opens a file that may be packed by gzip or xz; its first bytes tell."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        start = file.read(6)
        file.seek(0)
        stream: IO[bytes] = file
        if start.startswith(b"\x1f\x8b"):
            stream = cast(IO[bytes], stack.enter_context(gzip.open(file)))
        elif start == b"\xfd7zXZ\x00":
            stream = stack.enter_context(lzma.open(file))
        yield LimitedStream(stream, path.name)


def decode(data: bytes, name: str) -> str:
    """Decodes UTF-8 text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start:,})") from error


def read_tar(path: pathlib.Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yields the names and contents of members of a tar, which may be packed.

    Args:
      path: The tar.
      wanted: Tells by the name of a member whether it is needed. Such a member must be a regular file, and occur once.
    """
    seen: set[str] = set()
    # tarfile asks for a file object, of which it calls read, seek and tell.
    with open_stream(path) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:  # type: ignore[call-overload]
        for index, member in enumerate(archive):
            if index >= MEMBER_COUNT:
                raise ValueError(f"{path.name} has more than {MEMBER_COUNT:,} members")
            name = f"{member.name} in {path.name}"
            check_member_size(member.size, name)
            if not wanted(member.name):
                continue
            if member.name in seen:
                raise ValueError(f"{path.name} has two members with the name {member.name}")
            seen.add(member.name)
            file = archive.extractfile(member) if member.isreg() else None
            if file is None:
                raise ValueError(f"{name} is a link or a directory, and must be a regular file")
            yield member.name, file.read()
        # The check sum of a packed tar is verified at its end, which tarfile does not reach.
        while stream.read(CHUNK):
            pass


def read_tar_texts(path: pathlib.Path, names: Sequence[str]) -> list[str]:
    """Returns the texts of some members of a tar, in the order of `names`."""
    found = {name: decode(data, f"{name} in {path.name}") for name, data in read_tar(path, set(names).__contains__)}
    for name in names:
        if name not in found:
            raise ValueError(f"{path.name} has no member {name}")
    return [found[name] for name in names]


@contextlib.contextmanager
def open_zip(path: pathlib.Path) -> Iterator[zipfile.ZipFile]:
    """Opens a zip whose members all have different names and are within the limits together."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if len(infos) > MEMBER_COUNT:
            raise ValueError(f"{path.name} has more than {MEMBER_COUNT:,} members")
        check_total_size(sum(info.file_size for info in infos), path.name)
        seen: set[str] = set()
        for info in infos:
            if info.filename in seen:
                raise ValueError(f"{path.name} has two members with the name {info.filename}")
            seen.add(info.filename)
        yield archive


def read_zip(archive: zipfile.ZipFile, name: str) -> bytes:
    """Returns the content of a member of a zip."""
    archive_name = pathlib.Path(archive.filename or "the zip").name
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise ValueError(f"{archive_name} has no member {name}") from None
    if info.is_dir() or stat.S_ISLNK(info.external_attr >> 16):
        raise ValueError(f"{name} in {archive_name} is a link or a directory, and must be a regular file")
    # zipfile never unpacks more of a member than its header says.
    check_member_size(info.file_size, f"{name} in {archive_name}")
    return archive.read(info)


def read_zip_text(archive: zipfile.ZipFile, name: str) -> str:
    """Returns the text of a member of a zip."""
    return decode(read_zip(archive, name), name)


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Returns an array of an .npz file; the memory it takes is what the file holds, not what its header claims."""
    data = read_zip(archive, f"{name}.npy")
    file = io.BytesIO(data)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"the array {name} has the format version {version}, and must have (1, 0) or (2, 0)")
    shape, fortran_order, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError(f"the array {name} holds Python objects, which are not read")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran_order else "C")
