"""What a classifier is trained and tested on: configs of data, each a function from indices to inputs and labels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, Protocol

import jax
import numpy as np

from experiments.engine.config import PART_OF_RUN
from experiments.engine.data import papers, reviews
from experiments.engine.data.catalog import find
from experiments.engine.data.images import AREA, Augmentation, evaluation_image, normalize, training_image
from experiments.engine.data.order import shuffled
from experiments.engine.data.store import open_split
from experiments.engine.data.text import augment
from experiments.engine.errors import EngineError

Split = Literal["train", "test"]
Arrays = tuple[np.ndarray, np.ndarray]
# No part of what is trained: the same data may lie elsewhere.
DATA_DIR_FIELD = {PART_OF_RUN: False}
EVALUATED_STREAM = 2**31  # of packs of training papers: of no seed, so that all of them are new to every run


class Examples(Protocol):
    """Inputs with their classes, of which batches are made: a frozen dataclass, part of the run's config."""

    @property
    def num_classes(self) -> int:
        """Classes."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens; 1 where the inputs are images."""

    @property
    def length(self) -> int:
        """Tokens or pixels of the longest axis that says how long an example is."""

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and type of one input."""

    def count(self, split: Split) -> int:
        """Examples of a split; of training, those of an epoch."""

    def read(self, split: Split, indices: np.ndarray) -> Arrays:
        """Examples as they are: inputs (n, ...) and labels (n,)."""

    def training(self, position: int, count: int, seed: int, rng: np.random.Generator) -> Arrays:
        """The `count` examples of training that follow `position` examples, augmented by `rng`."""


@dataclasses.dataclass(frozen=True)
class ReviewData:
    """Long reviews of IMDB.

    Attributes:
      length: N, tokens.
      vocabulary: number of tokens.
      augmentation_rate: of the light EDA in training; 0: none.
      data_dir: of data sets.
    """

    length: int
    vocabulary: int
    augmentation_rate: float = 0.05
    data_dir: str | None = dataclasses.field(default=None, metadata=DATA_DIR_FIELD)

    @property
    def num_classes(self) -> int:
        """Negative and positive."""
        return reviews.NUM_CLASSES

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Tokens."""
        return jax.ShapeDtypeStruct((self.length,), np.int32)

    def _split(self, split: Split) -> reviews.Reviews:
        train, test = reviews.load_reviews(self.data_dir, self.length, self.vocabulary)
        return train if split == "train" else test

    def count(self, split: Split) -> int:
        """See `Examples`."""
        return len(self._split(split).labels)

    def read(self, split: Split, indices: np.ndarray) -> Arrays:
        """See `Examples`."""
        data = self._split(split)
        return data.tokens[indices], data.labels[indices]

    def training(self, position: int, count: int, seed: int, rng: np.random.Generator) -> Arrays:
        """See `Examples`."""
        tokens, labels = self.read("train", shuffled(self.count("train"), position, count, seed))
        return (augment(tokens, rng, rate=self.augmentation_rate) if self.augmentation_rate else tokens), labels


@dataclasses.dataclass(frozen=True)
class PaperData:
    """ArXiv papers, packed to N tokens of one class.

    Attributes:
      length: N, tokens.
      vocabulary: number of tokens.
      data_dir: of data sets.
    """

    length: int
    vocabulary: int
    data_dir: str | None = dataclasses.field(default=None, metadata=DATA_DIR_FIELD)

    @property
    def num_classes(self) -> int:
        """Archives."""
        return papers.NUM_CLASSES

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Tokens."""
        return jax.ShapeDtypeStruct((self.length,), np.int32)

    def _papers(self, split: Split) -> papers.Papers:
        return papers.load_papers(self.data_dir, self.vocabulary)[split]

    def count(self, split: Split) -> int:
        """Packs of the test papers; of training, as many as its tokens would fill."""
        if split == "test":
            return len(_test_packs(self)[1])
        return max(1, sum(map(len, self._papers("train").tokens)) // self.length)

    def read(self, split: Split, indices: np.ndarray) -> Arrays:
        """See `Examples`."""
        if split == "test":
            tokens, labels = _test_packs(self)
            return tokens[indices], labels[indices]
        return papers.stream_packs(self._papers("train"), indices, self.length, EVALUATED_STREAM)

    def training(self, position: int, count: int, seed: int, rng: np.random.Generator) -> Arrays:
        """See `Examples`; the stream has no end, and its packs are new ones."""
        del rng
        return papers.stream_packs(self._papers("train"), np.arange(position, position + count), self.length, seed)


@functools.cache
def _test_packs(data: PaperData) -> Arrays:
    return papers.pack_once(data._papers("test"), data.length)[:2]


@dataclasses.dataclass(frozen=True)
class PairData:
    """Pairs `[CLS] a [SEP] b` of packed ArXiv papers: of one class or not.

    Attributes:
      length: N, tokens.
      vocabulary: number of tokens.
      train_pairs: different pairs of training.
      test_pairs: pairs of the test papers.
      data_dir: of data sets.
    """

    length: int
    vocabulary: int
    train_pairs: int = 4000
    test_pairs: int = 1000
    data_dir: str | None = dataclasses.field(default=None, metadata=DATA_DIR_FIELD)

    @property
    def num_classes(self) -> int:
        """Other, same."""
        return 2

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Tokens."""
        return jax.ShapeDtypeStruct((self.length,), np.int32)

    def count(self, split: Split) -> int:
        """See `Examples`."""
        return self.train_pairs if split == "train" else self.test_pairs

    def read(self, split: Split, indices: np.ndarray) -> Arrays:
        """See `Examples`."""
        data = papers.load_papers(self.data_dir, self.vocabulary)[split]
        return papers.make_pairs(data, indices, self.length, seed=0)[:2]

    def training(self, position: int, count: int, seed: int, rng: np.random.Generator) -> Arrays:
        """See `Examples`."""
        del rng
        return self.read("train", shuffled(self.train_pairs, position, count, seed))


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images of a data set.

    Attributes:
      name: of the data set.
      classes: of it.
      size: side of the images that the model sees.
      patch_size: side of a patch.
      augmentation: of training.
      area: share of an image that a resized crop keeps.
      padding: pixels by which a padded crop moves an image at most.
      flip: whether images are flipped in training.
      data_dir: of data sets.
    """

    name: str
    classes: int
    size: int
    patch_size: int
    augmentation: Augmentation = "resized_crop"
    area: tuple[float, float] = AREA
    padding: int = 4
    flip: bool = True
    data_dir: str | None = dataclasses.field(default=None, metadata=DATA_DIR_FIELD)

    def __post_init__(self) -> None:
        if self.size % self.patch_size:
            raise ValueError(f"ImageData.size is {self.size}; it must be a multiple of patch_size = {self.patch_size}")

    @property
    def num_classes(self) -> int:
        """As of the data set."""
        return self.classes

    @property
    def vocabulary(self) -> int:
        """There are no tokens."""
        return 1

    @property
    def length(self) -> int:
        """Patches."""
        return (self.size // self.patch_size) ** 2

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """An image."""
        return jax.ShapeDtypeStruct((self.size, self.size, find(self.name).channels), np.float32)

    def count(self, split: Split) -> int:
        """See `Examples`."""
        return len(open_split(self.name, split, self.data_dir))

    def read(self, split: Split, indices: np.ndarray) -> Arrays:
        """See `Examples`."""
        examples = self._examples(split, indices)
        views = [evaluation_image(example["image"], self.size, self.augmentation) for example in examples]
        return self._arrays(views, examples)

    def training(self, position: int, count: int, seed: int, rng: np.random.Generator) -> Arrays:
        """See `Examples`."""
        examples = self._examples("train", shuffled(self.count("train"), position, count, seed))
        view = functools.partial(training_image, area=self.area, padding=self.padding, flip=self.flip)
        views = [view(example["image"], self.size, self.augmentation, rng) for example in examples]
        return self._arrays(views, examples)

    def _examples(self, split: Split, indices: np.ndarray) -> list[dict[str, Any]]:
        source = open_split(self.name, split, self.data_dir)
        return [source[int(index)] for index in indices]

    def _arrays(self, views: list[np.ndarray], examples: list[dict[str, Any]]) -> Arrays:
        labels = np.array([example["label"] for example in examples], np.int32)
        if labels.max() >= self.classes:
            raise EngineError(
                f"{self.name} has the label {labels.max()}, and the model {self.classes} classes; give the data set "
                "that the preset names"
            )
        return normalize(np.stack(views)), labels
