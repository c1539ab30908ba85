"""The runs behind the paper's tables: the command and the presets of each task, and all runs that are wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from elsaa_jax.types import AttentionKind
from experiments import arxiv, imdb, retrieval, tiny_imagenet, vision
from experiments.engine.suite import Presets


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The experiment of a task.

    Attributes:
      command: Module and flags that run it, as after `python -m`.
      presets: Presets of the task by name.
    """

    command: tuple[str, ...]
    presets: Presets


TASKS: dict[str, Experiment] = {
    "fashion_mnist": Experiment(("experiments.vision", "--dataset", "fashion_mnist"), vision.PRESETS["fashion_mnist"]),
    "imdb": Experiment(("experiments.imdb",), imdb.PRESETS),
    **{
        name: Experiment(("experiments.vision", "--dataset", name), presets)
        for name, presets in vision.PRESETS.items()
        if name != "fashion_mnist"
    },
    **{
        arxiv.task_of(variant): Experiment(("experiments.arxiv", "--variant", variant), presets)
        for variant, presets in arxiv.VARIANTS.items()
    },
    "retrieval": Experiment(("experiments.retrieval",), retrieval.PRESETS),
    "tiny_imagenet": Experiment(("experiments.tiny_imagenet",), tiny_imagenet.PRESETS),
}
SEVERAL_SEEDS = ("fashion_mnist", "imdb")
NUM_SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of an experiment.

    Attributes:
      task: Name of the task, a key of TASKS.
      attention: Attention of the model.
      seed: Random seed.
    """

    task: str
    attention: AttentionKind
    seed: int


def jobs(tasks: Sequence[str], attentions: Sequence[AttentionKind], first: int = 0) -> Iterator[Job]:
    """Yields all runs: the first seed of everything, then more seeds of elsaa and exact on the short tasks."""
    for task in tasks:
        for attention in attentions:
            yield Job(task, attention, first)
    for seed in range(first + 1, first + NUM_SEEDS):
        for task in tasks:
            for attention in attentions:
                if task in SEVERAL_SEEDS and attention in ("elsaa", "exact"):
                    yield Job(task, attention, seed)
