"""Measures contenders that take turns, each in a process of its own, so that all see the same noise of the machine.

`python -m experiments.benchmark.turns NAME` serves one contender: it reads one request per line of its input and
answers each with a line of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from experiments.benchmark.contenders import MATMUL, Case, Prepared, contenders
from experiments.engine.errors import EngineError
from experiments.engine.memory import free_bytes, with_malloc
from experiments.engine.results import Rows

TURN_SECONDS = 1.0  # length of a turn, which is several runs of a fast contender
TURN_RUNS = 20
WARM_SECONDS = 0.2  # Runs in this time do not count: threads that have slept are slow at first.
COLD_SECONDS = 3.0  # The first run of a turn counts if it takes longer than this.
PAUSE = 0.2  # seconds between two turns, in which threads of the last one stop spinning
FIRST_GROWTH = 4.5  # assumed growth of time and memory from one length to the next, before any is known
FREE_SHARE = 0.7  # share of the free memory that may be used


class Worker:
    """A contender in a process of its own."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "experiments.benchmark.turns", name]
        self.name = name
        self._process = subprocess.Popen(
            command,
            # On a GPU the first of several processes would take most of its memory.
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **with_malloc()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        """Returns the answer to a request. Raises EngineError if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            _, errors = self._process.communicate()
            raise EngineError((errors.strip().splitlines() or [f"ended with code {self._process.returncode}"])[-1])
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a case.

    Attributes:
      seconds: Longest time of one run.
      turns: Number of turns of each contender.
    """

    seconds: float
    turns: int


def measure(
    names: Sequence[str], cases: Sequence[Case], limits: Limits, done: Rows, tell: Callable[[str], None]
) -> Iterator[Rows]:
    """Yields the rows of one case after another. The cases differ only in their length, which grows.

    Args:
      names: Names of the contenders.
      cases: Cases to measure.
      limits: Limits of time.
      done: Rows of shorter cases.
      tell: Function that is called with a line of progress.
    """
    past: dict[str, Rows] = {name: [row for row in done if row["attention"] == name] for name in names}
    workers = {name: Worker(name) for name in names if not past[name] or "skipped" not in past[name][-1]}
    try:
        for case in cases:
            rows = {name: {"attention": name, **dataclasses.asdict(case)} for name in names}
            for name, row in rows.items():
                tell(f"{case.length:,} tokens, compiling {name}")
                row |= _prepare(workers, past[name], case, name, limits)
            _take_turns(workers, rows, case, limits, tell)
            for name, row in rows.items():
                past[name].append(row)
            yield list(rows.values())
    finally:
        for worker in workers.values():
            worker.close()


def _prepare(
    workers: dict[str, Worker], past: Sequence[dict[str, Any]], case: Case, name: str, limits: Limits
) -> dict[str, Any]:
    """Compiles a case and returns the facts of the compiler; or ends the worker and returns why the case is skipped."""
    if name not in workers:
        return {"skipped": past[-1]["skipped"]}
    reason = _too_much(past, limits)
    if reason is None:
        try:
            return workers[name].ask(case=dataclasses.asdict(case))
        except EngineError as error:
            reason = f"failed: {error}"
    workers.pop(name).close()
    return {"skipped": reason}


def _too_much(past: Sequence[dict[str, Any]], limits: Limits) -> str | None:
    """Returns why the next length cannot be run, as estimated from the growth so far; None if it can."""
    if not past:
        return None
    seconds, needed, free = _next(past, "seconds"), _next(past, "peak_bytes"), FREE_SHARE * free_bytes()
    if seconds > limits.seconds:
        return f"would take {seconds:.0f} s a run"
    if needed > free:
        return f"would need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB may be used"
    return None


def _next(past: Sequence[dict[str, Any]], name: Literal["seconds", "peak_bytes"]) -> float:
    """Estimates the time or the memory of the next length from the growth so far."""
    last = past[-1][name]
    growth = last / past[-2][name] if len(past) > 1 and past[-2][name] else FIRST_GROWTH
    return last * max(2.0, min(growth, FIRST_GROWTH))


def _take_turns(
    workers: dict[str, Worker],
    rows: dict[str, dict[str, Any]],
    case: Case,
    limits: Limits,
    tell: Callable[[str], None],
) -> None:
    """Lets the contenders take turns, and adds times and memory peaks to their rows."""
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(limits.turns):
        for name, worker in workers.items():
            if turn and sum(seconds[name]) > limits.seconds:
                continue  # A slow contender has used up its time.
            tell(f"{case.length:,} tokens, turn {turn + 1} of {limits.turns}: {name}")
            time.sleep(PAUSE)
            seconds[name] += worker.ask(run=True)
    known = contenders()
    for name, worker in workers.items():
        low, median, high = _quartiles(seconds[name])
        rows[name] |= {"seconds": median, "low": low, "high": high, "n": len(seconds[name])}
        rows[name]["peak_bytes"] = worker.ask(memory=True)
        if name == MATMUL or not case.backward:
            rows[name]["gflops"] = known[name].gflops(case, median)
    for row in rows.values():
        if row.get("gflops") and MATMUL in workers:
            row["share_of_peak"] = row["gflops"] / rows[MATMUL]["gflops"]


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, method="inclusive")
    return low, median, high


def resident_bytes(field: Literal["VmRSS", "VmHWM"]) -> int:
    """Returns the resident memory of this process, or its peak; without /proc, the peak since its start."""
    try:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    """Resets the memory peak of this process, if the system can."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def serve(name: str) -> None:
    """Answers requests: "case" compiles a case and warms up, "run" takes a turn, "memory" returns the memory peak."""
    contender = contenders()[name]
    answers, sys.stdout = sys.stdout, sys.stderr  # Some packages print to stdout.
    start = resident_bytes("VmRSS")
    prepared: Prepared | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if "case" in request:
            prepared = None  # Frees the memory of the last case.
            forget_peak()
            prepared = contender.prepare(Case(**request["case"]))
            prepared.run()
            answer: Any = {"compile_seconds": prepared.compile_seconds, "temp_bytes": prepared.temp_bytes}
        elif "run" in request:
            assert prepared is not None
            answer = turn(prepared.run)
        else:
            answer = max(0, resident_bytes("VmHWM") - start)
        print(json.dumps(answer), file=answers, flush=True)


def turn(run: Callable[[], Any]) -> list[float]:
    """Returns the seconds of each run of a turn. Short runs are preceded by warm-up runs, which do not count."""
    first = warm = _time(run)
    if first > COLD_SECONDS:
        return [first]
    while warm < WARM_SECONDS:
        warm += _time(run)
    seconds = [_time(run)]
    while len(seconds) < TURN_RUNS and sum(seconds) < TURN_SECONDS:
        seconds.append(_time(run))
    return seconds


def _time(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(sys.argv[1])
