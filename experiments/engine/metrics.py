"""Metrics of training: JSON lines in metrics.jsonl, and TensorBoard events if tensorboardX is installed.

The lines hold no times, so an interrupted run leaves the same file as one that was not interrupted. Each line ends with
a checksum of itself and of the line before it, which shows edited and lost lines. Lines without a checksum, written by
older versions, are read as they are.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import re
import zlib
from typing import Any, NamedTuple

from experiments.engine.config import TrainConfig
from experiments.engine.due import Due
from experiments.engine.errors import EngineError, disk_errors
from experiments.engine.parallel import is_main_process
from experiments.engine.workdir import CHECK, CHECKPOINTS, write_text

Record = dict[str, Any]

_CHECKED_LINE = re.compile(rf'(.*), "{CHECK}": "([0-9a-f]{{8}})"\}}')


class MetricsWriter:
    """A writer that appends one line per logged step. Only the main process writes."""

    def __init__(self, path: pathlib.Path, step: int) -> None:
        """Opens the metrics file for appending after `step`.

        Lines written after that step, and a truncated last line, are removed.
        """
        self._path = path
        self._board: Any = None
        self._file: Any = None
        if not is_main_process():
            return
        lines = _read(path)
        kept = [text for text, record in zip(lines.texts, lines.records, strict=True) if record["step"] <= step]
        self._last = kept[-1] if kept else ""
        write_text(path, "".join(f"{text}\n" for text in kept))
        with disk_errors(path):
            self._file = path.open("a")
        self._board = _tensorboard(path.parent / "tensorboard", step)

    def write(self, step: int, values: Record) -> None:
        """Writes the values of a step. They survive the end of the process; after `sync`, a crash of the machine."""
        if self._file is None:
            return
        body = json.dumps({"step": step, **values})
        self._last = f'{body[:-1]}, "{CHECK}": "{_checksum(self._last, body)}"}}'
        with disk_errors(self._path):
            self._file.write(f"{self._last}\n")
            self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, step)

    def sync(self) -> None:
        """Makes sure that all lines are on the disk."""
        if self._file is not None:
            with disk_errors(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            with disk_errors(self._path):
                self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: pathlib.Path) -> list[Record]:
    """Returns the lines of a metrics file, without checksums. Raises EngineError if the file is missing or damaged.

    A truncated last line, which a crash may leave, is left out.
    """
    if not path.exists():
        raise _refusal(path, None)
    lines = _read(path)
    if lines.problem is not None:
        raise _refusal(path, lines.problem)
    return lines.records


def check_metrics(path: pathlib.Path, train: TrainConfig, done: int) -> None:
    """Raises EngineError unless the file holds exactly the lines that a run logs in its first `done` steps.

    Lines of later steps are ignored while the run is unfinished: `MetricsWriter` removes them.
    """
    expected = [step for step in range(1, done + 1) if Due.after(step, train).log]
    if expected and not path.exists():
        raise _refusal(path, None)
    lines = _read(path)
    is_finished = done == train.total_steps
    found = [record["step"] for record in lines.records if is_finished or record["step"] <= done]
    if found == expected and not (is_finished and lines.problem):
        return
    if lines.problem is not None:
        raise _refusal(path, lines.problem)
    missing = [step for step in expected if step not in found]
    if missing:
        raise _refusal(path, f"the line of step {missing[0]} is missing")
    foreign = next(step for step in found if step not in expected)
    raise _refusal(path, f"line {found.index(foreign) + 1} is of step {foreign}, which this run does not log")


class _Lines(NamedTuple):
    """The lines of a metrics file up to the first one that cannot be used.

    Attributes:
      texts: The lines as they are stored.
      records: The same lines, parsed, without checksums.
      problem: Description of the line that ended the reading, None if every line can be used.
    """

    texts: list[str]
    records: list[Record]
    problem: str | None


def _read(path: pathlib.Path) -> _Lines:
    with disk_errors(path):
        try:
            content = path.read_text(errors="replace")
        except FileNotFoundError:
            content = ""
    texts: list[str] = []
    records: list[Record] = []
    *whole, rest = content.split("\n")
    for text in [*whole, rest] if rest else whole:
        problem, record = _parse(text, texts, records)
        if record is None:
            is_truncated = len(texts) == len(whole)  # It has no line end, as a crash leaves it.
            return _Lines(texts, records, None if is_truncated else f"line {len(texts) + 1} {problem}")
        texts.append(text)
        records.append(record)
    return _Lines(texts, records, None)


def _parse(text: str, texts: list[str], records: list[Record]) -> tuple[str, Record | None]:
    """Returns the record of a line that follows others; or what is wrong with the line, and None."""
    try:
        record = json.loads(text)
    except ValueError:
        return "is not JSON", None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        return "has no step", None
    last = texts[-1] if texts else ""
    if CHECK in record or _CHECKED_LINE.fullmatch(last):
        match = _CHECKED_LINE.fullmatch(text)
        if match is None or _checksum(last, f"{match[1]}}}") != match[2]:
            return "does not match its checksum: it was edited, or the line before it was edited or lost", None
        del record[CHECK]
    if records and step <= records[-1]["step"]:
        return f"is of step {step}, after that of step {records[-1]['step']}", None
    return "", record


def _checksum(last: str, body: str) -> str:
    """Returns the checksum of a line without its checksum, given the whole line before it."""
    return f"{zlib.crc32((last + body).encode()):08x}"


def _refusal(path: pathlib.Path, problem: str | None) -> EngineError:
    state = "missing" if problem is None else f"damaged ({problem})"
    return EngineError(
        f"{path} is {state}; nothing was changed: restore the file, move {path.parent / CHECKPOINTS} away to train "
        "again from the start, or take another --workdir"
    )


def _tensorboard(path: pathlib.Path, step: int) -> Any:
    """Returns a writer of TensorBoard events, None if tensorboardX is not installed."""
    try:
        module = importlib.import_module("tensorboardX")
    except ImportError:
        return None
    with disk_errors(path):
        return module.SummaryWriter(str(path), purge_step=step + 1)
