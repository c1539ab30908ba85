"""Checkpoints: complete or absent, verified leaf by leaf when they are read, and never overwritten.

Orbax writes each checkpoint into a temporary directory in the background, and renames the directory when it is
complete. The last and the best checkpoint are kept. Beside the arrays lies a list of all leaves with their types,
shapes and checksums, which shows a checkpoint that is damaged or of another model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
import sys
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from experiments.engine.errors import EngineError, disk_errors, one_line
from experiments.engine.parallel import is_main_process, wait_for_all
from experiments.engine.step import TrainState
from experiments.engine.task import Variables

VARIABLES, TRAINING, CONTENTS = "variables", "training", "contents"
TEMPORARY = "*.orbax-checkpoint-tmp"


def without_closed_loops(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Wraps a `sys.unraisablehook`, so that it does not show writes that end after their event loop was closed.

    When one of many writes fails, Orbax raises and closes its event loop. The others then cannot report to it, and each
    would print a traceback around the sentence that says what happened.
    """

    def quiet(report: Any) -> None:
        is_closed_loop = isinstance(report.exc_value, RuntimeError) and str(report.exc_value) == "Event loop is closed"
        if not (is_closed_loop and report.object is None):
            hook(report)

    return quiet


sys.unraisablehook = without_closed_loops(sys.unraisablehook)
# Orbax also logs the traceback of every failure that it raises. `EngineError` reports it in one sentence.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in pathlib.Path(record.pathname).parts)


class Checkpoints:
    """The checkpoints of one run.

    Attributes:
      directory: Directory with one subdirectory per checkpoint, named by the number of steps done.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        """Opens the directory, or creates it."""
        self.directory = directory
        policies = ocp.checkpoint_managers
        best = policies.BestN(get_metric_fn=_score, n=1)
        options = ocp.CheckpointManagerOptions(
            best_fn=_score,  # Without it, Orbax writes no scores.
            best_mode="max",
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(1), best]),
        )
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            steps = sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())
        try:
            self._manager = ocp.CheckpointManager(
                directory, options=options, item_names=(VARIABLES, TRAINING, CONTENTS)
            )
            known = sorted(self._manager.all_steps())
        except Exception as error:
            raise self._refusal(directory, error) from error
        for step in steps:
            if step not in known:
                raise self._refusal(directory / str(step), "it is not complete")

    @property
    def last(self) -> int | None:
        """Number of steps of the last checkpoint, None if there is none."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Number of steps of the checkpoint with the largest score; the last one if several or none have it."""
        return self._manager.best_step()

    def clean(self) -> None:
        """Removes the temporary directories of interrupted saves."""
        if is_main_process():
            with disk_errors(self.directory):
                for path in self.directory.glob(TEMPORARY):
                    shutil.rmtree(path)
        wait_for_all("clean")

    def save(self, state: TrainState, config: Any, score: float | None) -> None:
        """Starts to save a state of NumPy arrays, after the previous save has ended.

        Args:
          state: State to save. It must not be changed later.
          config: Config of the run, as JSON.
          score: Validation score of this state, None if it was not validated.
        """
        step = int(state.step)
        items = {VARIABLES: state.variables, TRAINING: _training_of(state)}
        contents = {"step": step, "config": fingerprint(config), "leaves": {k: leaves_of(v) for k, v in items.items()}}
        arguments = ocp.args.Composite(
            **{name: ocp.args.StandardSave(item) for name, item in items.items()},
            **{CONTENTS: ocp.args.JsonSave(contents)},
        )
        metrics = {} if score is None else {"score": float(score)}
        try:
            self._manager.save(step, args=arguments, metrics=metrics, force=True)
        except Exception as error:
            raise self._unsaved(error) from error

    def wait(self) -> None:
        """Waits until the last save has ended."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._unsaved(error) from error

    def close(self) -> None:
        """Ends the threads of Orbax."""
        try:
            self._manager.close()
        except Exception as error:
            raise self._unsaved(error) from error

    def restore_state(self, step: int, like: TrainState, config: Any) -> TrainState:
        """Returns the state of a checkpoint of this config, in NumPy arrays; `like` has its shapes."""
        items = {VARIABLES: like.variables, TRAINING: _training_of(like)}
        restored = self._restore(step, items, fingerprint(config))
        variables = dict(restored[VARIABLES])
        return TrainState(variables.pop("params"), variables, **restored[TRAINING])

    def restore_variables(self, step: int, like: Variables) -> Variables:
        """Returns the variables of a checkpoint, in NumPy arrays; `like` has their shapes."""
        return self._restore(step, {VARIABLES: like}, None)[VARIABLES]

    def _restore(self, step: int, like: dict[str, Any], config: str | None) -> dict[str, Any]:
        path = self.directory / str(step)
        try:
            contents = self._manager.restore(step, args=ocp.args.Composite(**{CONTENTS: ocp.args.JsonRestore()}))[
                CONTENTS
            ]
            stored = {name: contents["leaves"][name] for name in like}
            owner = contents["config"]
        except Exception as error:
            raise self._refusal(path, error) from error
        if config is not None and owner != config:
            raise self._refusal(path, "it was saved by a run of another config")
        for name, tree in like.items():
            difference = _first_foreign(stored[name], tree)
            if difference is not None:
                raise self._refusal(path, f"it is not of this model: {difference}")
        empty = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), like)
        arguments = {name: ocp.args.StandardRestore(tree) for name, tree in empty.items()}
        try:
            for name in like:
                _read_all(path / name)
            restored = dict(self._manager.restore(step, args=ocp.args.Composite(**arguments)).items())
        except Exception as error:
            raise self._refusal(path, error) from error
        for name, tree in restored.items():
            for leaf, description in leaves_of(tree).items():
                if description != stored[name][leaf]:
                    raise self._refusal(path, f"the checksum of {leaf} is wrong")
        return restored

    def _refusal(self, path: pathlib.Path, reason: Exception | str) -> EngineError:
        if isinstance(reason, Exception):
            reason = _reason(reason)
        return EngineError(
            f"the checkpoint {path} is damaged or foreign ({reason}); nothing was changed: move it away to continue "
            "from the one before it, if any, or take another --workdir"
        )

    def _unsaved(self, error: Exception) -> EngineError:
        whole = sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdigit())
        kept = f"the checkpoint of step {whole[-1]} is kept" if whole else "no checkpoint was saved before"
        return EngineError(
            f"no checkpoint can be written to {self.directory} ({_reason(error)}); {kept}: make room or "
            "give access and run the same command again"
        )


def fingerprint(config: Any) -> str:
    """Returns a short hash of a config that is JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def leaves_of(tree: Any) -> dict[str, list[Any]]:
    """Returns the type, shape and checksum of each leaf of a tree of NumPy arrays, by its path."""
    return {
        path: [*_kind(leaf), zlib.crc32(np.ascontiguousarray(leaf).tobytes())] for path, leaf in _flat(tree).items()
    }


def _training_of(state: TrainState) -> dict[str, Any]:
    return {"optimizer": state.optimizer, "rng": state.rng, "step": state.step}


def _score(metrics: dict[str, float]) -> float:
    score = metrics.get("score", -math.inf)
    return -math.inf if math.isnan(score) else score


def _flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _kind(leaf: Any) -> list[Any]:
    return [str(leaf.dtype), list(leaf.shape)]


def _first_foreign(stored: dict[str, list[Any]], like: Any) -> str | None:
    """Describes the first leaf in which a checkpoint differs from the model, None if there is none."""
    wanted = {path: _kind(leaf) for path, leaf in _flat(like).items()}
    for path in [*wanted, *(path for path in stored if path not in wanted)]:
        if path not in stored:
            return f"it has no {path}"
        if path not in wanted:
            return f"it has {path}, which the model does not have"
        dtype, shape, _ = stored[path]
        if [dtype, shape] != wanted[path]:
            return f"its {path} is {dtype}{shape}, the model's {wanted[path][0]}{wanted[path][1]}"
    return None


def _read_all(directory: pathlib.Path) -> None:
    """Reads the files of a tree one after another. Orbax reads all at once, and prints tracebacks if several fail."""
    base = {"driver": "file", "path": f"{directory}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    for key in store.list().result():
        store.read(key).result()


def _reason(error: Exception, size: int = 200) -> str:
    """Returns the text of an error of Orbax or tensorstore: that of the operating system if it is the cause."""
    text = one_line(error)
    code = re.search(r"os_error_code='(\d+)'", text)
    if code is not None:
        return os.strerror(int(code[1]))
    return text if len(text) <= size else f"{text[:size]} ..."
