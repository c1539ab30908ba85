"""The paper's presets beside the tables 6 and 7 of its appendix, and what every preset must hold."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import arxiv, imdb, retrieval, tiny_imagenet, vision
from experiments.engine.classification import Classification
from experiments.engine.data import store
from experiments.engine.data.examples import ImageData, ReviewData
from experiments.engine.presets import COMPARED
from experiments.engine.transformer import count_parameters
from experiments.paper import published
from experiments.paper.tasks import TASKS
from tests.experiments.engine.data.raw_sets import REAL, REAL_PREPARED, needs_real_data, real

ALL = {task: experiment.presets for task, experiment in TASKS.items()}

# Table 6, as it is printed: N, layers, heads, d, MLP dim, batch, accumulation, rate, weight decay, epochs.
TABLE_6 = {
    "imdb": (512, 1, 2, 128, 512, 32, 1, 1e-5, 5e-5, 150),
    "fashion_mnist": (784, 2, 4, 384, 1536, 32, 1, 6e-4, 0.1, 150),
    "oxford_pets": (16_384, 2, 4, 384, 1536, 32, 1, 6e-4, 0.1, 150),
    "flowers102": (16_384, 2, 4, 384, 1536, 32, 1, 6e-4, 0.1, 150),
    "food101": (16_384, 8, 8, 512, 2048, 8, 4, 3e-4, 0.001, 100),
    "arxiv_full_32k": (32_000, 4, 4, 256, 1024, 8, 16, 3e-4, 0.01, 33),
    "retrieval": (64_000, 4, 4, 256, 1024, 4, 16, 3e-4, 0.01, 50),
}
# Table 7: RACE bits, tables, ensembles; sortLSH bits, block, min length, neighbours; gate; eps.
ARXIV, IMDB, VISION = (
    (4, 4, 1, 5, 256, 4096, 0, 64, 1e-6),
    (3, 2, 2, 5, 32, 256, 0, 64, 1e-6),
    (2, 5, 1, 4, 32, 256, 0, 128, 1e-6),
)
TABLE_7 = {
    "imdb": IMDB,
    **dict.fromkeys(vision.PRESETS, VISION),
    "arxiv_full_32k": ARXIV,
    "retrieval": ARXIV,
}


@pytest.mark.parametrize("task", TABLE_6)
def test_the_paper_presets_are_its_tables(task):
    preset = ALL[task]["paper"]
    sizes, config = preset.sizes, preset.config
    assert (
        preset.data.length,
        sizes.num_layers,
        sizes.num_heads,
        sizes.width,
        sizes.mlp_width,
        preset.batch_size,
        preset.accumulate,
        preset.optimizer.learning_rate,
        preset.optimizer.weight_decay,
        preset.epochs,
    ) == TABLE_6[task]
    race, sparse, fusion = config.race, config.sparse, config.fusion
    assert (
        race.num_bits,
        race.num_tables,
        race.num_ensembles,
        sparse.num_bits,
        sparse.block_size,
        sparse.min_length,
        sparse.num_neighbors,
        fusion.gate_hidden,
        fusion.eps,
    ) == TABLE_7[task]
    assert (fusion.kind, fusion.lambda_kind, fusion.lambda_init) == ("elsaa", "scalar", 1.0)
    assert sizes.dropout_rate == 0.1
    assert not sizes.qkv_bias
    assert not sizes.is_causal


def test_what_the_appendix_says_beside_its_tables():
    assert retrieval.PRESETS["paper"].data.train_pairs == 4000
    assert retrieval.PRESETS["paper"].data.test_pairs == 1000
    assert arxiv.PAPER.data.vocabulary == 50_000
    assert imdb.PRESETS["paper"].data.augmentation_rate == 0.05
    fashion = vision.PRESETS["fashion_mnist"]["paper"]
    assert (fashion.data.size, fashion.data.patch_size, fashion.data.augmentation) == (28, 1, "padded_crop")
    assert (fashion.data.padding, fashion.data.flip, fashion.sizes.readout) == (4, True, "class")
    for name in ("oxford_pets", "flowers102", "food101"):
        preset = vision.PRESETS[name]["paper"]
        assert (preset.data.size, preset.data.patch_size) == (512, 4)
        assert (preset.data.augmentation, preset.data.area, preset.data.flip) == ("resized_crop", (0.08, 1.0), True)
        assert (preset.sizes.readout, preset.sizes.positions) == ("class", "learned")
        assert preset.sizes.num_positions == 16_385
    for task in ("arxiv_causal_32k", "arxiv_causal_64k", "tiny_imagenet"):
        sizes = ALL[task]["paper"].sizes
        assert (sizes.is_causal, sizes.readout) == (True, "last")
    tiny = tiny_imagenet.PRESETS["paper"].data
    assert (tiny.patch_size, tiny.augmentation, tiny.padding, tiny.flip) == (2, "padded_crop", 0, True)
    assert imdb.PRESETS["paper"].optimizer.final_fraction == 1.0  # a constant rate, as in the authors' code
    assert {task: presets["paper"].data.length for task, presets in ALL.items()} == published.LENGTHS


@pytest.mark.parametrize("preset", ["paper", "cpu"])
@pytest.mark.parametrize("task", ALL)
def test_all_methods_have_models_of_one_size(task, preset):
    chosen = ALL[task][preset]
    counts = {}
    for attention in COMPARED:
        run = Classification(task, preset, attention, chosen.config, chosen.sizes, chosen.data, 0)
        shapes = jax.eval_shape(run.init, jax.random.key(0))
        counts[attention] = count_parameters(shapes)
        if attention == "elsaa" or preset == "cpu":
            assert_has_a_loss(run, shapes)
    assert max(counts.values()) <= 1.1 * min(counts.values()), counts
    if chosen.sizes.positions == "learned":
        assert chosen.sizes.num_positions == chosen.data.length + (chosen.sizes.readout == "class")


def assert_has_a_loss(run, shapes):
    """At the length of the preset, without computing it."""
    params = shapes.pop("params")
    example = run.data.example
    batch = {
        "inputs": jax.ShapeDtypeStruct((2, *example.shape), example.dtype),
        "labels": jax.ShapeDtypeStruct((2,), np.int32),
    }
    loss, others = jax.eval_shape(run.loss, params, shapes, batch, jax.random.key(0))
    assert loss.shape == ()
    sown = {"elsaa": "multiplier", "sort_lsh_race": "sparse_log_mass"}.get(run.attention, "log_mass")
    assert {f"layer_{run.sizes.num_layers - 1}/{sown}", "accuracy"} <= set(others)


def data_set_of(task):
    data = ALL[task]["paper"].data
    return data.name if isinstance(data, ImageData) else "imdb" if isinstance(data, ReviewData) else "arxiv11"


@needs_real_data
@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_one_step_of_the_paper_preset(task, tmp_path):
    """In a process of its own, with one example in its batch."""
    real(data_set_of(task))
    flags = ["--preset", "paper", "--steps", "1", "--batch-size", "1", "--examples", "2", "--workdir", str(tmp_path)]
    root = pathlib.Path(published.__file__).parents[2]
    prepared = REAL_PREPARED or str(tmp_path / "prepared")
    environment = os.environ | {"XLA_FLAGS": "", store.DATA_DIR: REAL, store.PREPARED_DIR: prepared}
    subprocess.run([sys.executable, "-m", *TASKS[task].command, *flags], check=True, cwd=root, env=environment)
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (row["task"], row["preset"], row["steps"], row["n_test"]) == (task, "paper", 1, 2)
