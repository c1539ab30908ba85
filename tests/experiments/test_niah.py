"""The main job in small: its table, its files, its model, its errors; and, as a slow test, in full."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elsaa_jax import ElsaaConfig, RaceConfig, SortLshConfig
from experiments.engine.errors import EngineError
from experiments.engine.models import Decoder
from experiments.engine.transformer import ModelConfig, stretch
from experiments.niah import command
from experiments.niah import task as niah_task
from experiments.niah.haystack import VOCABULARY, make_examples
from experiments.niah.presets import PRESETS
from experiments.niah.report import write_report
from tests.compilation import optimized
from tests.experiments.engine.helpers import assert_refused

SMALL = ["--attention", "exact", "--steps", "3", "--batch-size", "2", "--length", "512", "--examples", "32"]
COLUMNS = {
    "attention",
    "seed",
    "train_length",
    "length",
    "depth",
    "distractors",
    "accuracy",
    "n",
    "low",
    "high",
    "seconds_per_example",
}


def run(workdir, *flags):
    return command.run(command.make_parser().parse([*SMALL, "--workdir", str(workdir), *flags]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("niah")
    return workdir, run(workdir)


def test_the_whole_job_in_small(trained, capsys):
    workdir, rows = trained
    assert [row["length"] for row in rows] == [512]
    for row in rows:
        assert set(row) >= COLUMNS
        assert row["n"] == 32
        assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1
        assert sum(part["n"] for part in row["by_depth"]) == 32
    stored = json.loads((workdir / "results.json").read_text())
    assert stored["rows"] == rows
    assert set(stored) == {"config", "versions", "rows", "check"}

    # Done is done; and the same model answers other questions.
    assert run(workdir, "--eval-only") == rows
    assert "| exact" in capsys.readouterr().out
    more = run(workdir, "--eval-only", "--resume", "--depths", "0.05,0.95", "--distractors", "4")
    assert [(row["depth"], row["distractors"]) for row in more] == [(0.05, 4), (0.95, 4)]
    assert json.loads((workdir / "results.json").read_text())["rows"] == rows + more
    assert {"accuracy.png", "depths_exact.png"} <= {path.name for path in workdir.iterdir()}


def test_a_trained_model_can_be_loaded(trained):
    logits = command.load(trained[0], "exact")
    out = logits(make_examples(np.random.default_rng(0), 2, 100).tokens)
    chex.assert_shape(out, (2, VOCABULARY))
    assert np.ptp(out) > 0
    with pytest.raises(EngineError, match="race is not the work dir of a run; train first"):
        command.load(trained[0], "race")


def test_a_length_that_does_not_fit_is_not_run(trained, monkeypatch, capsys):
    monkeypatch.setattr(niah_task, "free_bytes", lambda: 10)
    (row,) = run(trained[0], "--distractors", "1")
    assert row["accuracy"] is None
    assert row["n"] == 0
    assert "GiB are free" in row["skipped"]
    assert "GiB are free" in capsys.readouterr().out


@pytest.mark.parametrize("is_older", [True, False])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda stored: stored.pop("rows"), "its 'rows' are missing"),
        (lambda stored: stored.update(rows=[3]), "its 'rows' are missing or not a list of objects"),
        (lambda stored: stored["rows"][0].pop("n"), "row 1 has no 'n'"),
        (lambda stored: stored.pop("config"), "it has no 'config'"),
    ],
)
def test_damaged_results_of_another_method_are_refused(damage, message, is_older, trained, tmp_path):
    """Results without a checksum are older ones, of which only the form can be checked."""
    other = tmp_path / "race/results.json"
    shutil.copytree(trained[0] / "exact", other.parent)
    stored = json.loads(other.read_text())
    damage(stored)
    if is_older:
        del stored["check"]
    else:
        message = "its checksum is wrong"
    other.write_text(json.dumps(stored))
    before = other.read_bytes()
    wanted = rf"race/results.json is damaged \({re.escape(message)}.*move it away to evaluate again"
    with pytest.raises(EngineError, match=wanted):
        write_report(tmp_path)
    assert other.read_bytes() == before


def test_an_edited_accuracy_of_another_method_is_refused(trained, tmp_path):
    other = tmp_path / "race/results.json"
    shutil.copytree(trained[0] / "exact", other.parent)
    stored = json.loads(other.read_text())
    stored["rows"][0]["accuracy"] = 0.25 + stored["rows"][0]["accuracy"]
    other.write_text(json.dumps(stored))
    with pytest.raises(EngineError, match=r"race/results.json is damaged \(its checksum is wrong\)"):
        write_report(tmp_path)


def test_the_names_of_methods_are_a_closed_set():
    assert tuple(niah_task.METHODS) == get_args(niah_task.Method)


def test_every_method_has_a_model():
    for method in niah_task.METHODS:
        task = niah_task.Niah(method, PRESETS["default"].config, ModelConfig(), 0, 1024)
        shapes = jax.eval_shape(task.init, jax.random.key(0))
        sizes = {x.size for x in jax.tree.leaves(shapes["params"])}
        assert 64 * VOCABULARY in sizes
    paper = command.run_config(command.make_parser().parse(["--preset", "paper"]), "elsaa")
    assert paper.task.model.config.sparse.pairing == "rank"
    assert paper.train.total_steps == 5880


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length", "100"], "argument --length: '100' is not an integer >= 512"),
        (["--lengths", "512,10"], "argument --lengths: '10' is not an integer >= 512"),
        (["--attention", "linear"], "'linear' is not known"),
        (["--depths", "0.5,2"], "'0.5,2' is no list of numbers from 0.05 to 0.95"),
        (["--positions", "alibi"], "invalid choice: 'alibi'"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert_refused(command.make_parser(), flags, message, capsys)


def test_lengths():
    assert command.lengths_up_to(4096) == (512, 1024, 2048, 4096)
    assert command.lengths_up_to(3000) == (512, 1024, 2048, 3000)
    assert command.lengths_up_to(512) == (512,)
    config = command.run_config(command.make_parser().parse(["--lengths", "1000,65536"]), "elsaa")
    assert config.task.evaluation.lengths == (1000, 65536)
    assert config.task.evaluations()[1]["examples"] == 100


@pytest.mark.parametrize(("positions", "attention"), [("none", "elsaa"), ("learned", "exact"), ("rope", "exact")])
def test_the_decoder_reads_its_last_positions(positions, attention):
    config = ElsaaConfig(race=RaceConfig(chunk_size=16), sparse=SortLshConfig(num_bits=4, block_size=8), short_conv=3)
    model = Decoder(
        ModelConfig(width=16, num_heads=2, mlp_width=32, positions=positions, num_positions=30), 20, attention, config
    )
    tokens = jax.random.randint(jax.random.key(0), (2, 50), 0, 20)
    variables = model.init(jax.random.key(1), tokens)
    whole = jax.jit(model.apply)(variables, tokens)
    last = jax.jit(lambda v, t: model.apply(v, t, 3))(variables, tokens)
    chex.assert_shape(last, (2, 3, 20))
    chex.assert_trees_all_close(last, whole[:, -3:], atol=1e-5)


def test_learned_positions_are_stretched():
    table = jnp.arange(5.0)[:, None]
    np.testing.assert_allclose(stretch(table, 3)[:, 0], [0, 1, 2])
    np.testing.assert_allclose(stretch(table, 9)[:, 0], np.arange(9) / 2, atol=1e-6)


@pytest.mark.slow
def test_the_main_job(tmp_path):
    """The README's command, in about ten minutes, and what must hold of its model."""
    words = [sys.executable, "-m", "experiments.niah", "--length", "65536", "--workdir", str(tmp_path)]
    root = pathlib.Path(command.__file__).parents[2]
    subprocess.run(words, check=True, cwd=root, env=os.environ | {"XLA_FLAGS": ""})
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["length"] for row in rows] == [512 << i for i in range(8)]
    for row in rows:
        assert row["accuracy"] >= 0.99, row
        assert row["n"] >= (500 if row["length"] <= 4096 else 100), row
    assert_strictly_causal(tmp_path)


def assert_strictly_causal(workdir):
    """Other tokens after a place change no bit up to it."""
    task, variables = command.load_task(workdir, "elsaa")
    tokens = make_examples(np.random.default_rng(0), 2, 1024).tokens
    logits = optimized(lambda t: task.model.apply(variables, t))
    before = logits(tokens)
    for place in (0, 300, 700, 1022):
        changed = tokens.copy()
        changed[:, place + 1 :] = (changed[:, place + 1 :] + 7) % VOCABULARY
        np.testing.assert_array_equal(before[:, : place + 1], logits(changed)[:, : place + 1])
