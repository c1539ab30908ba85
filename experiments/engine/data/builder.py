"""The builder of tensorflow-datasets of a set of the catalogue. Nothing here needs TensorFlow."""

from __future__ import annotations

import contextlib
import io
import logging
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.engine.data import raw
from experiments.engine.data.archives import Example
from experiments.engine.data.catalog import DataSet, Form
from experiments.engine.errors import EngineError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise EngineError(f'data sets need {error.name}, which is not installed: pip install -e ".[data]"') from error

# It recommends another decoder whenever a set is read.
logging.getLogger("absl").addFilter(lambda record: "OpenCV" not in record.getMessage())


def make_builder(data_set: DataSet, form: Form, folder: pathlib.Path, directory: pathlib.Path) -> Any:
    """A builder that prepares a set from its raw files into a directory."""
    with tfds.core.registered.skip_registration():

        class Builder(tfds.core.GeneratorBasedBuilder):
            """Yields what the raw files hold."""

            name = data_set.name
            VERSION = tfds.core.Version(data_set.version)

            def _info(self) -> Any:
                label = tfds.features.Scalar(np.int64)
                if data_set.kind == "image":
                    image = tfds.features.Image(shape=(None, None, data_set.channels))
                    features = {"image": image, "label": label}
                else:
                    features = {"text": tfds.features.Text(), "label": label, "id": tfds.features.Text()}
                return tfds.core.DatasetInfo(
                    builder=self, description=data_set.home, features=tfds.features.FeaturesDict(features)
                )

            def _split_generators(self, dl_manager: Any) -> Any:
                del dl_manager
                return {split: self._generate_examples(split) for split in data_set.splits}

            def _generate_examples(self, split: str) -> Iterator[tuple[str, Example]]:
                return raw.examples(data_set, form, folder, split)

    return Builder(data_dir=str(directory), file_format="array_record")


def build(data_set: DataSet, form: Form, folder: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Prepares a set in a directory, with a progress bar on a terminal, and returns where it lies there."""
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    builder = make_builder(data_set, form, folder, directory)
    with contextlib.redirect_stdout(io.StringIO()):  # It tells of the directory, which is not the last one.
        builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)


def read_split(directory: pathlib.Path, split: str) -> Any:
    """A split of a prepared set, as a sequence that is read by index."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tfds.builder_from_directory(str(directory)).as_data_source(split=split)
