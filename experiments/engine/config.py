"""Configuration of a run: the length curriculum, the optimiser and the task. Bad values are refused by name."""

from __future__ import annotations

import dataclasses
import math
import numbers
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from elsaa_jax.checks import check_choice, check_instance, check_int, check_number

Decay = Literal["cosine", "linear"]
ParallelKind = Literal["jit", "pmap"]
Which = Literal["last", "best"]

MAX_SEED = 2**32 - 1
# `dataclasses.field(metadata={PART_OF_RUN: False})` marks a field that does not change what is trained.
PART_OF_RUN = "part_of_run"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of the length curriculum. Tasks may subclass it to add fields.

    Attributes:
      steps: Number of training steps.
      length: Number of tokens per example.
      batch_size: Number of examples per step, over all devices and microbatches.
    """

    steps: int
    length: int
    batch_size: int

    def __post_init__(self) -> None:
        check_int("Stage.steps", self.steps, 1)
        check_int("Stage.length", self.length, 1)
        check_int("Stage.batch_size", self.batch_size, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of AdamW and of the decay of its learning rate.

    Attributes:
      learning_rate: Peak learning rate.
      decay: Shape of the decay from the peak to the end of training, "cosine" or "linear".
      final_fraction: Learning rate at the end, as a fraction of the peak.
      b1: Decay rate of the first moment.
      b2: Decay rate of the second moment.
      weight_decay: Weight decay, applied to all parameters.
      clip_norm: Largest global norm of the gradient.
    """

    learning_rate: float = 3e-3
    decay: Decay = "cosine"
    final_fraction: float = 0.05
    b1: float = 0.9
    b2: float = 0.98
    weight_decay: float = 0.01
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_number(f"{name}.learning_rate", self.learning_rate, 0.0, open_low=True)
        check_choice(f"{name}.decay", self.decay, get_args(Decay))
        check_number(f"{name}.final_fraction", self.final_fraction, 0.0, 1.0)
        check_number(f"{name}.b1", self.b1, 0.0, math.nextafter(1.0, 0.0))
        check_number(f"{name}.b2", self.b2, 0.0, math.nextafter(1.0, 0.0))
        check_number(f"{name}.weight_decay", self.weight_decay, 0.0)
        check_number(f"{name}.clip_norm", self.clip_norm, 0.0, open_low=True)


@dataclasses.dataclass(frozen=True)
class TrainConfig(OptimizerConfig):
    """Settings of a training run, with those of the optimiser.

    Attributes:
      stages: Stages of the length curriculum, in order.
      warmup_steps: Number of steps of the linear warm-up. At most half of all steps are used for it.
      accumulate: Number of microbatches per step, computed one after another.
      seed: Random seed for initialisation, data order and dropout.
      parallel: "jit" (one program over a mesh of all devices) or "pmap" (one program per device).
      checkpoint_every: Steps between checkpoints. 0 saves only at validations and at the end.
      validate_every: Steps between validations. 0 validates only at the end.
      log_every: Steps between lines of metrics.
      evaluate_on: Checkpoint that is evaluated, "last" or "best".
    """

    stages: tuple[Stage, ...]
    warmup_steps: int = 30
    accumulate: int = 1
    seed: int = 0
    parallel: ParallelKind = "jit"
    checkpoint_every: int = 50
    validate_every: int = 0
    log_every: int = 10
    evaluate_on: Which = "last"

    def __post_init__(self) -> None:
        check_instance("TrainConfig.stages", self.stages, tuple)
        if not self.stages:
            raise ValueError("TrainConfig.stages is (); it must have one Stage or more")
        for index, stage in enumerate(self.stages):
            check_instance(f"TrainConfig.stages[{index}]", stage, Stage)
        super().__post_init__()
        check_int("TrainConfig.warmup_steps", self.warmup_steps, 0)
        check_int("TrainConfig.accumulate", self.accumulate, 1)
        check_int("TrainConfig.seed", self.seed, 0, MAX_SEED)
        check_choice("TrainConfig.parallel", self.parallel, get_args(ParallelKind))
        check_int("TrainConfig.checkpoint_every", self.checkpoint_every, 0)
        check_int("TrainConfig.validate_every", self.validate_every, 0)
        check_int("TrainConfig.log_every", self.log_every, 1)
        check_choice("TrainConfig.evaluate_on", self.evaluate_on, get_args(Which))

    @property
    def total_steps(self) -> int:
        """Number of steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def examples_before(self, step: int) -> int:
        """Returns how many examples the first `step` steps use."""
        count = 0
        for stage in self.stages:
            count += min(step, stage.steps) * stage.batch_size
            step = max(0, step - stage.steps)
        return count

    def stage_at(self, step: int) -> Stage:
        """Returns the stage of the step that follows `step` steps."""
        check_int("step", step, 0, self.total_steps - 1)
        for stage in self.stages:
            if step < stage.steps:
                break
            step -= stage.steps
        return stage


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Configuration of a whole run.

    Attributes:
      task: Frozen dataclass that follows the protocol `Task`.
      train: Settings of its training.
    """

    task: Any
    train: TrainConfig

    def __post_init__(self) -> None:
        if not dataclasses.is_dataclass(self.task) or isinstance(self.task, type):
            raise ValueError(f"RunConfig.task is {self.task!r}; it must be an instance of a frozen dataclass")
        check_instance("RunConfig.train", self.train, TrainConfig)

    def to_json(self) -> dict[str, Any]:
        """Returns all values as JSON, with the name of each class. Two runs are the same if these are equal."""
        return {"task": as_json(self.task, "task"), "train": as_json(self.train, "train")}


def as_json(value: Any, name: str) -> Any:
    """Converts a value of a config to JSON; `name` is its place, for the error message."""
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
    """Inverts `as_json` for configs of these classes, numbers, strings and tuples."""
    if isinstance(value, dict):
        names = {cls.__name__: cls for cls in classes}
        fields = {key: from_json(item, classes) for key, item in value.items() if key != "class"}
        return names[value["class"]](**fields)
    return tuple(from_json(item, classes) for item in value) if isinstance(value, list) else value
