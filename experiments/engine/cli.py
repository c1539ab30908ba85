"""Command lines: the flags that all experiments share, and errors of one line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, get_args

from experiments.engine import pictures
from experiments.engine.config import ParallelKind, Stage
from experiments.engine.errors import EngineError, one_line
from experiments.engine.parallel import initialize_distributed

USAGE_ERROR, INTERRUPTED = 2, 130

StageT = TypeVar("StageT", bound=Stage)


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that ends each help text with the default of its flag, unless the text states it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if not text or "default: " in text.lower() or "%(default)" in text or default is argparse.SUPPRESS:
            return text
        if default is None:
            default = "none"
        elif action.nargs == 0:
            default = "on" if default else "off"
        elif isinstance(default, tuple):
            default = ",".join(map(str, default))
        return f"{text} Default: {str(default).replace('%', '%%')}."


class PlainParser(argparse.ArgumentParser):
    """A parser with the flags that every experiment has. An error is one line, with exit code 2.

    An experiment adds its own flags with `add_argument`. A JSON file given by --config holds values for flags that are
    not on the command line.
    """

    def __init__(self, description: str) -> None:
        super().__init__(
            prog=_program(), description=description, formatter_class=HelpFormatter, allow_abbrev=False, add_help=False
        )
        add = self.add_argument
        add("-h", "--help", action="help", help="Print this help and exit.")
        add("--seed", type=integer(0), default=0, help="Random seed for initialisation, data order and hash planes.")
        add("--workdir", type=pathlib.Path, help="Directory for results and all other files of a run.")
        add("--config", type=pathlib.Path, help="JSON file with values for these flags.")
        add("--traceback", action="store_true", help="Print the traceback of an error.")

    def set_help(self, **texts: str) -> None:
        """Replaces help texts, by the name of the flag with underscores."""
        for action in self._actions:
            action.help = texts.get(action.dest, action.help)

    def error(self, message: str) -> NoReturn:
        """Prints the error on one line and exits."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {' '.join(message.split())}\n")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Returns the values of the flags, with those of the file given by --config."""
        values = list(sys.argv[1:] if arguments is None else arguments)
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        first.add_argument("--config", type=pathlib.Path)
        try:
            path = first.parse_known_args(values)[0].config
        except argparse.ArgumentError as error:
            self.error(str(error))
        return self.parse_args([*(self._flags_of(path) if path else []), *values])

    def _flags_of(self, path: pathlib.Path) -> list[str]:
        """Returns the flags of a JSON file. Flags of the command line come after them, and so override them."""
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


def _program() -> str | None:
    """Returns the command of the running module, such as 'python -m experiments.niah'; None if it is not a module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return None if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


class Parser(PlainParser):
    """A parser with the flags of every experiment that trains: attentions, budget, checkpoints and devices."""

    def __init__(self, description: str, attentions: Sequence[str], *, default: str = "all") -> None:
        """Makes the parser.

        Args:
          description: First line of --help.
          attentions: Names that --attention accepts.
          default: Default of --attention.
        """
        super().__init__(description)
        add = self.add_argument
        add(
            "--attention",
            type=names(attentions),
            default=default,
            help=f"Attentions to run: {one_or_more(attentions)}.",
        )
        add(
            "--steps",
            type=integer(1),
            help="Number of training steps. Each curriculum stage is scaled in proportion. Default: as in the preset.",
        )
        add(
            "--batch-size",
            type=integer(1),
            help="Number of examples per step in the last curriculum stage. The other stages are scaled in proportion. "
            "Default: as in the preset.",
        )
        add("--resume", action="store_true", help="Continue an existing run; fail if there is none.")
        add("--eval-only", action="store_true", help="Evaluate a trained model; fail if training is not finished.")
        add(
            "--data-dir",
            type=pathlib.Path,
            help="Directory that holds the data sets. Default: the environment variable ELSAA_DATA_DIR, or data.",
        )
        add(
            "--parallel",
            choices=get_args(ParallelKind),
            default="jit",
            help="How a step uses several devices: jit over a mesh, or pmap.",
        )
        add("--accumulate", type=integer(1), default=1, help="Number of microbatches per step.")
        add(
            "--coordinator",
            help="HOST:PORT of process 0, if several processes train together. Default: one process.",
        )
        add("--num-processes", type=integer(1), help="Number of processes, with --coordinator. Default: one process.")
        add("--process-id", type=integer(0), help="Index of this process, with --coordinator. Default: one process.")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Returns the values of the flags, and joins the other processes if --coordinator is given."""
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
    """Returns an argument type that accepts integers of at least `low`."""

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
    """Returns an argument type that accepts numbers above `low` and below `high`."""

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
    """Returns an argument type that accepts "all", or some of the known names separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        if text == "all":
            return tuple(known)
        given = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not known; use all, or some of {','.join(known)}")
        return given

    return parse


def one_or_more(known: Sequence[str]) -> str:
    """Returns the part of a help text that lists the names which `names` accepts."""
    return f"all, or some of the following, separated by commas: {', '.join(known)}"


def scale_stages(
    stages: Sequence[StageT], steps: int | None = None, batch_size: int | None = None
) -> tuple[StageT, ...]:
    """Scales stages in proportion, to `steps` in total and `batch_size` in the last stage; each value is at least 1."""
    counts = [stage.steps for stage in stages]
    if steps is not None:
        total, longest = sum(counts), counts.index(max(counts))
        counts = [max(1, count * steps // total) for count in counts]
        counts[longest] = max(
            1, counts[longest] + steps - sum(counts)
        )  # Steps lost by rounding go to the longest stage.
    sizes = [stage.batch_size for stage in stages]
    if batch_size is not None:
        sizes = [max(1, round(size * batch_size / sizes[-1])) for size in sizes]
    changed = zip(stages, counts, sizes, strict=True)
    return tuple(dataclasses.replace(stage, steps=count, batch_size=size) for stage, count, size in changed)


def print_files(files: Sequence[pathlib.Path]) -> None:
    """Prints the paths of the files that a report wrote, and how to get pictures if there are none."""
    print(f"\nWrote {', '.join(map(str, files))}.")
    if not any(path.suffix == ".png" for path in files):
        print(pictures.NOT_DRAWN)


def main(run: Callable[[], Any]) -> NoReturn:
    """Runs an experiment and exits.

    An error that the user can correct is printed on one line, with exit code 2; --traceback adds its traceback. Ctrl-C
    gives exit code 130.
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
