"""The command line that all experiments share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from experiments.engine.config import Stage
from experiments.engine.errors import EngineError, one_line
from experiments.engine.parallel import initialize_distributed

USAGE_ERROR, INTERRUPTED = 2, 130

StageT = TypeVar("StageT", bound=Stage)


class PlainParser(argparse.ArgumentParser):
    """An ArgumentParser with the flags of every experiment; an error is one line, with exit code 2.

    An experiment adds its own flags by `add_argument`. The values of a JSON file given by --config stand in for flags
    that are not on the command line.
    """

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
        )
        self.add_argument("--seed", type=integer(0), default=0, help="of all that is random")
        self.add_argument("--workdir", type=pathlib.Path, help="for results, and what else a run keeps")
        self.add_argument("--config", type=pathlib.Path, help="JSON file with values for these flags")
        self.add_argument("--traceback", action="store_true", help="show where an error comes from")

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {' '.join(message.split())}\n")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The values of the flags."""
        values = list(sys.argv[1:] if arguments is None else arguments)
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        first.add_argument("--config", type=pathlib.Path)
        try:
            path = first.parse_known_args(values)[0].config
        except argparse.ArgumentError as error:
            self.error(str(error))
        return self.parse_args([*(self._flags_of(path) if path else []), *values])

    def _flags_of(self, path: pathlib.Path) -> list[str]:
        """The flags that a JSON file stands for, in front of those of the command line, which win."""
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            self.error(f"--config {path} cannot be read ({error.strerror})")
        except ValueError as error:
            self.error(f"--config {path} is not JSON ({error})")
        if not isinstance(values, dict):
            self.error(f"--config {path} must hold a JSON object, of flags and their values")
        actions = {action.dest: action for action in self._actions if action.dest not in ("help", "config")}
        flags: list[str] = []
        for key, value in values.items():
            action = actions.get(key.lstrip("-").replace("-", "_"))
            if action is None:
                known = ", ".join(sorted(actions))
                self.error(f"--config {path} has {key!r}, which is no flag; the flags are {known}")
            flags += self._flag_of(path, action, value)
        return flags

    def _flag_of(self, path: pathlib.Path, action: argparse.Action, value: Any) -> list[str]:
        name = action.option_strings[0]
        if value is None:
            return []
        if action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"--config {path} has {json.dumps(value)} for {name}; it must be true or false")
            return [name] if value else []
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if isinstance(value, bool | dict):
            self.error(f"--config {path} has {json.dumps(value)} for {name}; it must be a number or a string")
        return [f"{name}={value}"]


class Parser(PlainParser):
    """The flags of every experiment that trains: attentions by name, budget, checkpoints and devices."""

    def __init__(self, description: str, attentions: Sequence[str], *, default: str = "all") -> None:
        """Args: attentions: known names; default: of --attention."""
        super().__init__(description)
        add = self.add_argument
        add("--attention", type=names(attentions), default=default, help=f"all, or some of {','.join(attentions)}")
        add("--steps", type=integer(1), help="of training; the stages are scaled alike")
        add("--batch-size", type=integer(1), help="of the last stage; the others are scaled alike")
        add("--resume", action="store_true", help="refuse to start from the beginning")
        add("--eval-only", action="store_true", help="refuse to train")
        add("--data-dir", type=pathlib.Path, help="of data sets")
        add("--parallel", choices=("jit", "pmap"), default="jit", help="how a step uses several devices")
        add("--accumulate", type=integer(1), default=1, help="microbatches of a step")
        add("--coordinator", help="HOST:PORT of process 0, where several processes train together")
        add("--num-processes", type=integer(1), help="of the run, with --coordinator")
        add("--process-id", type=integer(0), help="of this process, with --coordinator")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The values of the flags; joins the other processes where --coordinator is given."""
        parsed = super().parse(arguments)
        distributed = (parsed.coordinator, parsed.num_processes, parsed.process_id)
        if any(value is not None for value in distributed):
            if None in distributed:
                self.error("--coordinator, --num-processes and --process-id must be given together")
            if parsed.process_id >= parsed.num_processes:
                self.error(f"--process-id is {parsed.process_id}; it must be less than --num-processes")
            initialize_distributed(*distributed)
        return parsed


def integer(low: int) -> Callable[[str], int]:
    """A type of argument: an integer that is `low` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {low}")
        return value

    return parse


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A type of argument: a number above `low`, and below `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low < value < high:
            allowed = f"above {low}" + ("" if math.isinf(high) else f" and below {high}")
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {allowed}")
        return value

    return parse


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A type of argument: all, or some of the known names with commas between them."""

    def parse(text: str) -> tuple[str, ...]:
        if text == "all":
            return tuple(known)
        given = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not known; use all, or some of {','.join(known)}")
        return given

    return parse


def scale_stages(
    stages: Sequence[StageT], steps: int | None = None, batch_size: int | None = None
) -> tuple[StageT, ...]:
    """Stages with `steps` in all and `batch_size` in the last, the others in proportion, each at least 1."""
    counts = [stage.steps for stage in stages]
    if steps is not None:
        total, longest = sum(counts), counts.index(max(counts))
        counts = [max(1, count * steps // total) for count in counts]
        counts[longest] = max(1, counts[longest] + steps - sum(counts))  # what rounding has left over
    sizes = [stage.batch_size for stage in stages]
    if batch_size is not None:
        sizes = [max(1, round(size * batch_size / sizes[-1])) for size in sizes]
    changed = zip(stages, counts, sizes, strict=True)
    return tuple(dataclasses.replace(stage, steps=count, batch_size=size) for stage, count, size in changed)


def main(run: Callable[[], Any]) -> NoReturn:
    """Runs an experiment; an error that the user can mend is one line, with exit code 2, Ctrl-C has exit code 130.

    With --traceback on the command line, errors of values and files show where they come from as well.
    """
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (EngineError, ValueError, OSError) as error:
        if "--traceback" in sys.argv:
            traceback.print_exc()
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    sys.exit(0)
