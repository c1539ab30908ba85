"""Examples for training and testing classifiers. Each config of data maps indices to inputs and labels."""

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
# The directory is not part of the identity of a run: the same data may be in another place.
DATA_DIR_FIELD = {PART_OF_RUN: False}
EVALUATED_STREAM = 2**31  # seed of the training papers that are evaluated; no run uses it for training


class Examples(Protocol):
    """Labelled inputs for batches. An implementation is a frozen dataclass and part of the config of a run."""

    @property
    def num_classes(self) -> int:
        """Number of classes."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids; 1 if the inputs are images."""

    @property
    def length(self) -> int:
        """Number of tokens or patches of an example."""

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one input."""

    def count(self, split: Split) -> int:
        """Returns the number of examples of a split; for training, the number in an epoch."""

    def read(self, split: Split, indices: np.ndarray) -> Arrays:
        """Returns examples without augmentation: inputs (n, ...) and labels (n,)."""

    def training(self, position: int, count: int, seed: int, rng: np.random.Generator) -> Arrays:
        """Returns the `count` training examples that follow the first `position`, augmented by `rng`."""


@dataclasses.dataclass(frozen=True)
class ReviewData:
    """Long reviews of IMDB, positive or negative.

    Attributes:
      length: Number of tokens of an example, N.
      vocabulary: Number of token ids.
      augmentation_rate: Rate of deletions and swaps in training. 0 means no augmentation.
      data_dir: Directory of data sets. The default is the one that ELSAA_DATA_DIR names.
    """

    length: int
    vocabulary: int
    augmentation_rate: float = 0.05
    data_dir: str | None = dataclasses.field(default=None, metadata=DATA_DIR_FIELD)

    @property
    def num_classes(self) -> int:
        """Number of classes: negative and positive."""
        return reviews.NUM_CLASSES

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the tokens of an example."""
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
    """ArXiv papers, joined to examples of N tokens of one class.

    Attributes:
      length: Number of tokens of an example, N.
      vocabulary: Number of token ids.
      data_dir: Directory of data sets. The default is the one that ELSAA_DATA_DIR names.
    """

    length: int
    vocabulary: int
    data_dir: str | None = dataclasses.field(default=None, metadata=DATA_DIR_FIELD)

    @property
    def num_classes(self) -> int:
        """Number of classes, which are archives of arXiv."""
        return papers.NUM_CLASSES

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the tokens of an example."""
        return jax.ShapeDtypeStruct((self.length,), np.int32)

    def _papers(self, split: Split) -> papers.Papers:
        return papers.load_papers(self.data_dir, self.vocabulary)[split]

    def count(self, split: Split) -> int:
        """Returns the number of test examples; for training, the number that its tokens would fill."""
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
        """See `Examples`. The stream is endless, and each of its examples is new."""
        del rng
        return papers.stream_packs(self._papers("train"), np.arange(position, position + count), self.length, seed)


@functools.cache
def _test_packs(data: PaperData) -> Arrays:
    """Returns all test examples."""
    return papers.pack_once(data._papers("test"), data.length)[:2]


@dataclasses.dataclass(frozen=True)
class PairData:
    """Pairs `[CLS] a [SEP] b` of joined ArXiv papers, which are of one class or not.

    Attributes:
      length: Number of tokens of an example, N.
      vocabulary: Number of token ids.
      train_pairs: Number of different training pairs.
      test_pairs: Number of pairs of test papers.
      data_dir: Directory of data sets. The default is the one that ELSAA_DATA_DIR names.
    """

    length: int
    vocabulary: int
    train_pairs: int = 4000
    test_pairs: int = 1000
    data_dir: str | None = dataclasses.field(default=None, metadata=DATA_DIR_FIELD)

    @property
    def num_classes(self) -> int:
        """Number of classes: different and same."""
        return 2

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the tokens of an example."""
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
      name: Name of the data set.
      classes: Number of classes of the model.
      size: Height and width of the images that the model sees.
      patch_size: Height and width of a patch.
      augmentation: Kind of augmentation in training.
      area: Range of the share of an image that a resized crop keeps.
      padding: Number of pixels by which a padded crop moves an image at most.
      flip: Whether half of the images are mirrored in training.
      data_dir: Directory of data sets. The default is the one that ELSAA_DATA_DIR names.
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
        """Number of classes."""
        return self.classes

    @property
    def vocabulary(self) -> int:
        """Images have no tokens: 1."""
        return 1

    @property
    def length(self) -> int:
        """Number of patches of an image."""
        return (self.size // self.patch_size) ** 2

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of an image."""
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
        labels = np.array([example["label"] for example in examples], np.int64)
        outside = labels[(labels < 0) | (labels >= self.classes)]
        if outside.size:
            raise EngineError(
                f"{self.name} has the label {outside[0]}, and the model {self.classes} classes; give the data set "
                "that the preset names"
            )
        return normalize(np.stack(views)), labels.astype(np.int32)
