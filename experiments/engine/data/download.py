"""Downloads of raw files from their public addresses, over https."""

from __future__ import annotations

import http.client
import pathlib
import sys
import urllib.error
import urllib.request
from typing import Any

from experiments.engine.data import limits, sums
from experiments.engine.data.catalog import Form
from experiments.engine.data.disk import PARTIAL, locked, read_only, writing
from experiments.engine.errors import one_line

SECONDS = 30  # without an answer
CHUNK = 1 << 20


def download_form(form: Form, folder: pathlib.Path) -> str:
    """Downloads the files of a published form that are not in the folder; returns why it could not, or ""."""
    if (closed := read_only(folder)) is not None:
        return f"{closed} cannot be written to, so it is not downloaded"
    with writing(folder), locked(folder / ".lock"):
        for file in form.files:
            assert file.url is not None  # The last form of every set is published.
            if (folder / file.name).is_file():
                continue
            try:
                _download(file.url, folder / file.name)
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                cause = error.reason if isinstance(error, urllib.error.URLError) else error
                return f"{file.url} cannot be reached ({' '.join(str(cause).split())})"
            sums.record(file, folder)
    return ""


def _download(url: str, path: pathlib.Path) -> None:
    """Downloads a file. It gets its name when it is complete."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    print(f"downloading {url}", file=sys.stderr, flush=True)
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as response, partial.open("wb") as file:
            if not response.url.startswith("https://"):
                raise ConnectionError(f"it leads to {response.url}, which is not https")
            size = response.headers.get("Content-Length", "")
            expected, done = int(size) if size.isdecimal() else 0, 0
            while chunk := _receive(response):
                file.write(chunk)
                done += len(chunk)
                if done > limits.TOTAL_BYTES:
                    raise ConnectionError(f"it sends more than {limits.TOTAL_BYTES:,} bytes")
                if sys.stderr.isatty():
                    print(f"\r{done / 1e6:,.0f} of {expected / 1e6:,.0f} MB", end="", file=sys.stderr, flush=True)
        if expected and done != expected:
            raise ConnectionError(f"it ended after {done} of {expected} bytes")
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _receive(response: Any) -> bytes:
    """Returns the next part of a download. An OSError here is one of the connection, not of the disk."""
    try:
        return response.read(CHUNK)
    except OSError as error:
        raise ConnectionError(one_line(error)) from error
