"""What a run is: the length curriculum, the optimiser, and the task. Each config refuses bad values by name."""

from __future__ import annotations

import dataclasses
import math
import numbers
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from elsaa_jax.checks import check_choice, check_instance, check_int, check_number

MAX_SEED = 2**32 - 1
# `dataclasses.field(metadata={PART_OF_RUN: False})`: a field that does not change what is trained.
PART_OF_RUN = "part_of_run"


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the length curriculum. Tasks subclass it with fields of their own.

    Attributes:
      steps: of training.
      length: tokens of an example.
      batch_size: examples of a step, over all devices and microbatches.
    """

    steps: int
    length: int
    batch_size: int

    def __post_init__(self) -> None:
        check_int("Stage.steps", self.steps, 1)
        check_int("Stage.length", self.length, 1)
        check_int("Stage.batch_size", self.batch_size, 1)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How a task is trained.

    Attributes:
      stages: the length curriculum, in order.
      learning_rate: its peak.
      warmup_steps: of the linear warm-up; at most half of all steps are used for it.
      decay: from the peak to the end, "cosine" or "linear".
      final_fraction: of the peak, reached at the end.
      b1: decay of the first moment of AdamW.
      b2: decay of its second moment.
      weight_decay: of AdamW, on all parameters.
      clip_norm: largest global norm of the gradient.
      accumulate: microbatches of a step, one after another.
      seed: of the parameters, the data and the randomness of the steps.
      parallel: "jit" (one program over a mesh of all devices) or "pmap".
      checkpoint_every: steps between checkpoints; 0: at validations and at the end alone.
      validate_every: steps between validations; 0: at the end alone.
      log_every: steps between lines of metrics.
      evaluate_on: the checkpoint that evaluations use, "last" or "best".
    """

    stages: tuple[Stage, ...]
    learning_rate: float = 3e-3
    warmup_steps: int = 30
    decay: Literal["cosine", "linear"] = "cosine"
    final_fraction: float = 0.05
    b1: float = 0.9
    b2: float = 0.98
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    accumulate: int = 1
    seed: int = 0
    parallel: Literal["jit", "pmap"] = "jit"
    checkpoint_every: int = 50
    validate_every: int = 0
    log_every: int = 10
    evaluate_on: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        check_instance("TrainConfig.stages", self.stages, tuple)
        if not self.stages:
            raise ValueError("TrainConfig.stages is (); it must have one Stage or more")
        for index, stage in enumerate(self.stages):
            check_instance(f"TrainConfig.stages[{index}]", stage, Stage)
        check_number("TrainConfig.learning_rate", self.learning_rate, 0.0, open_low=True)
        check_int("TrainConfig.warmup_steps", self.warmup_steps, 0)
        check_choice("TrainConfig.decay", self.decay, ("cosine", "linear"))
        check_number("TrainConfig.final_fraction", self.final_fraction, 0.0, 1.0)
        for name in ("b1", "b2"):
            check_number(f"TrainConfig.{name}", getattr(self, name), 0.0, math.nextafter(1.0, 0.0))
        check_number("TrainConfig.weight_decay", self.weight_decay, 0.0)
        check_number("TrainConfig.clip_norm", self.clip_norm, 0.0, open_low=True)
        check_int("TrainConfig.accumulate", self.accumulate, 1)
        check_int("TrainConfig.seed", self.seed, 0, MAX_SEED)
        check_choice("TrainConfig.parallel", self.parallel, ("jit", "pmap"))
        check_int("TrainConfig.checkpoint_every", self.checkpoint_every, 0)
        check_int("TrainConfig.validate_every", self.validate_every, 0)
        check_int("TrainConfig.log_every", self.log_every, 1)
        check_choice("TrainConfig.evaluate_on", self.evaluate_on, ("last", "best"))

    @property
    def total_steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def examples_before(self, step: int) -> int:
        """Examples of the first `step` steps."""
        count = 0
        for stage in self.stages:
            count += min(step, stage.steps) * stage.batch_size
            step = max(0, step - stage.steps)
        return count

    def stage_at(self, step: int) -> Stage:
        """The stage of the step that follows `step` steps."""
        check_int("step", step, 0, self.total_steps - 1)
        for stage in self.stages:
            if step < stage.steps:
                break
            step -= stage.steps
        return stage


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
      task: a frozen dataclass that follows `Task`.
      train: how it is trained.
    """

    task: Any
    train: TrainConfig

    def __post_init__(self) -> None:
        if not dataclasses.is_dataclass(self.task) or isinstance(self.task, type):
            raise ValueError(f"RunConfig.task is {self.task!r}; it must be an instance of a frozen dataclass")
        check_instance("RunConfig.train", self.train, TrainConfig)

    def to_json(self) -> dict[str, Any]:
        """All values as JSON has them, with the name of each class: two runs are the same where these are equal."""
        return {"task": as_json(self.task, "task"), "train": as_json(self.train, "train")}


def as_json(value: Any, name: str) -> Any:
    """A value of a config as JSON has it; `name` is its place, for the error."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.metadata.get(PART_OF_RUN, True)
        }
        return {"class": type(value).__name__, **{key: as_json(item, f"{name}.{key}") for key, item in fields.items()}}
    if isinstance(value, Mapping):
        return {str(key): as_json(item, f"{name}.{key}") for key, item in value.items()}
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Sequence):
        return [as_json(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if hasattr(value, "__name__"):  # a dtype or a function
        return value.__name__
    raise ValueError(f"{name} is {value!r}; it must be a number, a string, a sequence, a mapping or a dataclass")


def from_json(value: Any, classes: Sequence[type]) -> Any:
    """The inverse of `as_json`, for configs of these classes, numbers, strings and tuples."""
    if isinstance(value, dict):
        names = {cls.__name__: cls for cls in classes}
        fields = {key: from_json(item, classes) for key, item in value.items() if key != "class"}
        return names[value["class"]](**fields)
    return tuple(from_json(item, classes) for item in value) if isinstance(value, list) else value
