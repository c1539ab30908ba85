"""Builders of tensorflow-datasets for the sets of the catalog. Nothing here needs TensorFlow."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import pathlib
import sys
import tempfile
import warnings
from typing import Any

import numpy as np

from experiments.engine.data import raw
from experiments.engine.data.archives import Examples
from experiments.engine.data.catalog import DataSet, Form, SplitName
from experiments.engine.data.manifest import REMEDY
from experiments.engine.errors import EngineError, one_line

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise EngineError(f'data sets need {error.name}, which is not installed: pip install -e ".[data]"') from error

FEATURES = "features.json"
# It recommends another decoder whenever a set is read.
logging.getLogger("absl").addFilter(lambda record: "OpenCV" not in record.getMessage())


def features_of(data_set: DataSet) -> Any:
    """Returns the features of the examples of a set."""
    label = tfds.features.Scalar(np.int64)
    if data_set.kind == "image":
        image = tfds.features.Image(shape=(None, None, data_set.channels))
        return tfds.features.FeaturesDict({"image": image, "label": label})
    return tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": label, "id": tfds.features.Text()})


def make_builder(data_set: DataSet, form: Form, folder: pathlib.Path, directory: pathlib.Path) -> Any:
    """Returns a builder that prepares a set from its raw files into a directory."""
    with tfds.core.registered.skip_registration():

        class Builder(tfds.core.GeneratorBasedBuilder):
            """A builder that yields the examples of the raw files."""

            name = data_set.name
            VERSION = tfds.core.Version(data_set.version)

            def _info(self) -> Any:
                return tfds.core.DatasetInfo(builder=self, description=data_set.home, features=features_of(data_set))

            def _split_generators(self, dl_manager: Any) -> Any:
                del dl_manager
                return {split: self._generate_examples(split) for split in data_set.splits}

            def _generate_examples(self, split: SplitName) -> Examples:
                return raw.examples(data_set, form, folder, split)

    return Builder(data_dir=str(directory), file_format="array_record")


def build(data_set: DataSet, form: Form, folder: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Prepares a set in a directory, with a progress bar on a terminal, and returns the set's place there."""
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    builder = make_builder(data_set, form, folder, directory)
    with contextlib.redirect_stdout(io.StringIO()):  # It prints the directory, which is renamed afterwards.
        builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)


def read_splits(data_set: DataSet, directory: pathlib.Path) -> dict[str, Any]:
    """Returns the splits of a prepared set by name, each a sequence that is read by index."""
    _check_features(data_set, directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            builder = tfds.builder_from_directory(str(directory))
            return {split: builder.as_data_source(split=split) for split in data_set.splits}
    except Exception as error:  # The library raises many kinds for metadata that it cannot read.
        raise EngineError(f"{directory} cannot be read ({one_line(error)}); {REMEDY}") from error


def _check_features(data_set: DataSet, directory: pathlib.Path) -> None:
    """Refuses a prepared set whose features are not those of the catalog.

    tensorflow-datasets imports the modules that this file names, so the file is compared before it is read there.
    """
    path = directory / FEATURES
    with tempfile.TemporaryDirectory() as expected:
        features_of(data_set).save_config(expected)
        wanted = json.loads((pathlib.Path(expected) / FEATURES).read_text(encoding="utf-8"))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path} is damaged ({one_line(error)}); {REMEDY}") from error
    if found != wanted:
        raise EngineError(f"{path} does not describe the examples of {data_set.name}; {REMEDY}")
