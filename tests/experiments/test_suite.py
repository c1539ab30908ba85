"""An experiment in small, from raw files to its results; and that it learns."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from experiments import retrieval, vision
from experiments.engine import report, suite
from experiments.engine.classification import Classification
from experiments.engine.classifier import ClassifierConfig
from experiments.engine.config import Stage
from experiments.engine.data.examples import ImageData, PairData, PaperData
from experiments.engine.errors import EngineError
from experiments.engine.presets import Preset, cpu_optimizer
from tests.experiments.engine.data.raw_sets import paper_text, write_arxiv, write_pack

COLUMNS = {
    "task",
    "attention",
    "seed",
    "preset",
    "length",
    "steps",
    "parameters",
    "train_accuracy",
    "test_accuracy",
    "n_test",
    "low",
    "high",
    "seconds",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A data dir with bright and dark images, and a preset that tells them apart in a few steps."""
    data_dir = tmp_path_factory.mktemp("data")
    write_pack(data_dir, "food101", count=16)
    preset = Preset(
        sizes=ClassifierConfig(width=8, num_layers=1, num_heads=2, mlp_width=8, readout="class", patch_size=4),
        config=vision.CPU_CONFIG,
        data=ImageData("food101", 2, size=8, patch_size=4),
        optimizer=cpu_optimizer(3e-2, weight_decay=0.0),
        batch_size=8,
        steps=12,
        checkpoint_every=5,
    )
    return data_dir, {"cpu": preset}


def run(tiny, workdir, *flags):
    """Runs the default preset, which is "cpu" here."""
    data_dir, presets = tiny
    arguments = suite.make_parser("Tiny.").parse(["--data-dir", str(data_dir), "--workdir", str(workdir), *flags])
    return suite.run("tiny", presets, arguments)


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs")
    return workdir, run(tiny, workdir, "--attention", "elsaa,exact")


def test_results_of_every_run(tiny, finished, capsys):
    workdir, rows = finished
    assert [row["attention"] for row in rows] == ["elsaa", "exact"]
    for row in rows:
        assert set(row) >= COLUMNS
        assert (row["task"], row["preset"], row["length"], row["steps"], row["n_test"]) == ("tiny", "cpu", 4, 12, 4)
        assert row["test_accuracy"] == row["train_accuracy"] == 1.0
        assert 0 < row["low"] < row["high"] == 1.0
        assert 0 <= row["waited"] < row["training_seconds"] < row["seconds"]
    assert json.loads((workdir / "results.json").read_text())["rows"] == rows
    assert (workdir / "branches.png").stat().st_size > 1000
    assert run(tiny, workdir, "--attention", "elsaa", "--eval-only") == rows[:1]
    assert "| elsaa" in capsys.readouterr().out
    # An evaluation of fewer examples is no other run.
    assert run(tiny, workdir, "--attention", "elsaa", "--eval-only", "--examples", "2") == rows[:1]


def test_the_last_means_of_the_branches(finished):
    found = report.diagnostics(finished[0])
    assert set(found) == {"elsaa-0", "exact-0"}
    assert set(found["exact-0"]) == {"log_mass"}
    assert len(found["elsaa-0"]["multiplier"]) == 1
    metrics = [json.loads(line) for line in (finished[0] / "elsaa-0/metrics.jsonl").read_text().splitlines()]
    assert found["elsaa-0"]["multiplier"] == [metrics[-1]["layer_0/multiplier"]]


def edit_json(path, edit):
    stored = json.loads(path.read_text())
    edit(stored)
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("results.json", lambda stored: stored["rows"][0].update(test_accuracy=0.5), "its checksum is wrong"),
        ("results.json", lambda stored: (stored.pop("check"), stored.pop("rows")), "its 'rows' are missing"),
        (
            "results.json",
            lambda stored: (stored.pop("check"), stored["rows"][0].pop("n_test")),
            "row 1 has no 'n_test'",
        ),
        ("results.json", lambda stored: (stored.pop("check"), stored.pop("config")), "no training stage"),
        (
            "results.json",
            lambda stored: (stored.pop("check"), stored["rows"][0].update(attention="flash")),
            "'flash' is not an attention",
        ),
        ("time.json", lambda stored: stored.update(seconds=0.0), "its checksum is wrong"),
        ("config.json", lambda stored: stored["config"].pop("train"), "its training settings cannot be read"),
    ],
)
def test_damaged_files_of_another_run_are_refused(name, edit, message, finished, tmp_path):
    workdir = shutil.copytree(finished[0], tmp_path / "runs")
    edit_json(workdir / "exact-0" / name, edit)
    with pytest.raises(EngineError, match=rf"exact-0/{name} is damaged \(.*{re.escape(message)}"):
        report.write_report(workdir)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_text("".join(path.read_text().splitlines(True)[:-1])), "step 12 is missing"),
        (lambda path: path.write_text("{}\n" + path.read_text()), r"line 1 has no step"),
    ],
)
def test_damaged_metrics_of_another_run_are_refused(edit, message, finished, tmp_path):
    workdir = shutil.copytree(finished[0], tmp_path / "runs")
    edit(workdir / "exact-0/metrics.jsonl")
    for call in (report.write_report, report.diagnostics):
        with pytest.raises(EngineError, match=rf"exact-0/metrics.jsonl .*{message}"):
            call(workdir)


def test_an_unfinished_run_has_a_place_in_the_report(finished, tmp_path):
    workdir = shutil.copytree(finished[0], tmp_path / "runs")
    (workdir / "exact-0/results.json").unlink()
    path = workdir / "exact-0/metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # as after a crash
    report.write_report(workdir)
    assert [row["attention"] for row in report.collect(workdir)] == ["elsaa"]
    assert set(report.diagnostics(workdir)) == {"elsaa-0", "exact-0"}
    path.unlink()
    assert set(report.diagnostics(workdir)) == {"elsaa-0"}


def test_a_run_goes_on_in_the_middle_of_an_epoch(tiny, tmp_path, monkeypatch):
    """12 training images in batches of 8: step 5 lies in the middle of the fourth epoch."""
    seen = []
    training = ImageData.training

    def recorded(self, position, count, seed, rng):
        seen.append(position)
        if position == 56 and seen.count(56) == 1:
            raise OSError("the disk is gone")
        return training(self, position, count, seed, rng)

    monkeypatch.setattr(ImageData, "training", recorded)
    with pytest.raises(OSError, match="the disk is gone"):
        run(tiny, tmp_path / "cut", "--attention", "exact", "--seed", "1")
    seen.clear()
    seen.append(56)
    run(tiny, tmp_path / "cut", "--attention", "exact", "--seed", "1")
    assert seen[1:] == [40, 48, 56, 64, 72, 80, 88]
    run(tiny, tmp_path / "whole", "--attention", "exact", "--seed", "1")
    cut, whole = ((tmp_path / name / "exact-1/metrics.jsonl").read_bytes() for name in ("cut", "whole"))
    assert cut == whole


def test_flags_win_over_the_preset(tiny):
    data_dir, presets = tiny
    parser = suite.make_parser("Tiny.")

    def config(*flags, **changes):
        arguments = parser.parse(["--data-dir", str(data_dir), *flags])
        preset = dataclasses.replace(presets["cpu"], **changes)
        return suite.run_config("tiny", "cpu", preset, "elsaa", arguments).train

    assert (config().total_steps, config().stages[0].batch_size, config().accumulate) == (12, 8, 1)
    paper = config(steps=None, epochs=3, accumulate=2, warmup=0.5)
    assert (paper.total_steps, paper.stages[0].batch_size, paper.accumulate) == (3, 16, 2)
    assert paper.warmup_steps == 2
    given = config("--steps", "7", "--batch-size", "4", steps=None, epochs=3, accumulate=2)
    assert (given.total_steps, given.stages[0].batch_size, given.accumulate) == (7, 4, 1)
    with pytest.raises(ValueError, match=r"Preset.epochs is 3 and steps is 12; give one of them"):
        config(epochs=3)


def test_batches_are_the_same_for_every_method(tmp_path):
    texts = {
        split: [(label, paper_text(start + index, label)) for label in range(11) for index in range(2)]
        for split, start in (("train", 0), ("valid", 10), ("test", 20))
    }
    write_arxiv(tmp_path, texts)
    for data in (PaperData(300, 500, data_dir=str(tmp_path)), PairData(300, 500, 40, 20, data_dir=str(tmp_path))):
        preset = retrieval.PRESETS["cpu"]
        stage = Stage(1, 300, 6)
        batches = [
            Classification("t", "cpu", name, preset.config, preset.sizes, data, 3).batch(
                stage, 12, np.random.default_rng(0)
            )
            for name in ("elsaa", "exact")
        ]
        for name in ("inputs", "labels"):
            np.testing.assert_array_equal(batches[0][name], batches[1][name])
        assert batches[0]["inputs"].shape == (6, 300)
        assert data.count("test") > 0
        inputs, labels = data.read("test", np.arange(3))
        assert inputs.shape == (3, 300)
        assert labels.shape == (3,)
