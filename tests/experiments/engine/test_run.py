"""Runs from the start to the end, and a second time."""

import json
import shutil
import sys
import threading
import types

import jax
import numpy as np
import pytest

from experiments.engine.errors import EngineError
from experiments.engine.metrics import MetricsWriter, read_metrics
from experiments.engine.run import load_variables, train_and_evaluate
from tests.experiments.engine.helpers import assert_same_bits, snapshot
from tests.experiments.engine.toy import STAGES, ToyTask, toy_config


def no_more(*args):
    raise AssertionError("this was done before")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The work dir of a run, and its rows."""
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, train_and_evaluate(toy_config(), workdir)


def test_a_run_leaves_its_files(finished):
    workdir, rows = finished
    stored = json.loads((workdir / "config.json").read_text())
    assert stored["config"] == toy_config().to_json()
    assert stored["versions"].keys() == {"python", "jax", "flax", "project"}
    assert stored["versions"]["jax"] == jax.__version__
    results = json.loads((workdir / "results.json").read_text())
    assert results["rows"] == rows
    assert len(rows) == 6
    assert (results["config"], results["versions"]) == (stored["config"], stored["versions"])
    lines = read_metrics(workdir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]
    assert [line["length"] for line in lines] == [3, 3, 5, 5, 5]
    assert ["validation/score" in line for line in lines] == [False, True, False, True, True]
    assert all(line.keys() >= {"loss", "accuracy", "gradient_norm", "learning_rate"} for line in lines)


def test_the_last_and_the_best_checkpoint_are_kept(finished):
    workdir, _ = finished
    scores = {line["step"]: line.get("validation/score") for line in read_metrics(workdir / "metrics.jsonl")}
    best = max((step for step in scores if scores[step] is not None), key=scores.get)
    assert best == 4  # The toy's score falls as it learns.
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["10", "4"]
    variables = {which: load_variables(ToyTask(), workdir, which) for which in ("last", "best")}
    for which, step in (("last", 10), ("best", 4)):
        assert ToyTask().validate(variables[which])["score"] == scores[step]
    assert_same_bits(variables["last"]["hashes"], ToyTask().init(jax.random.key(0))["hashes"])


def test_a_second_run_does_nothing_again(finished, monkeypatch):
    workdir, rows = finished
    before = snapshot(workdir)
    for name in ("batch", "validate", "evaluate"):
        monkeypatch.setattr(ToyTask, name, no_more)
    assert train_and_evaluate(toy_config(), workdir) == rows
    assert train_and_evaluate(toy_config(), workdir, resume=True, eval_only=True) == rows
    assert snapshot(workdir) == before


def test_evaluation_alone_uses_what_was_saved(finished, tmp_path, monkeypatch):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "results.json").unlink()
    monkeypatch.setattr(ToyTask, "batch", no_more)
    assert train_and_evaluate(toy_config(), tmp_path, eval_only=True) == finished[1]


def test_evaluation_of_the_best_checkpoint(tmp_path):
    rows = train_and_evaluate(toy_config(stages=STAGES[:1], validate_every=1, evaluate_on="best"), tmp_path)
    sums = {}
    for which in ("best", "last"):
        sums[which] = float(np.asarray(load_variables(ToyTask(), tmp_path, which)["params"]["embed"])[0].sum())
    assert rows[0]["sum"] == sums["best"] != sums["last"]


def test_other_versions_are_told(finished, tmp_path, capsys):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["versions"]["jax"] = "0.1"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    train_and_evaluate(toy_config(), tmp_path)
    assert f"{tmp_path} was begun with other versions" in capsys.readouterr().err


def test_the_largest_seed(tmp_path):
    train_and_evaluate(toy_config(stages=STAGES[:1], seed=2**32 - 1), tmp_path)


def test_pmap_runs_as_jit_does(finished, tmp_path):
    train_and_evaluate(toy_config(parallel="pmap"), tmp_path)
    one, other = (read_metrics(path / "metrics.jsonl") for path in (finished[0], tmp_path))
    assert [line["step"] for line in one] == [line["step"] for line in other]
    np.testing.assert_allclose([line["loss"] for line in one], [line["loss"] for line in other], rtol=1e-4)


def test_a_run_in_another_thread_takes_no_signals(tmp_path):
    config = toy_config(stages=STAGES[:1])
    thread = threading.Thread(target=train_and_evaluate, args=(config, tmp_path))
    thread.start()
    thread.join()
    assert load_variables(ToyTask(), tmp_path)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path, monkeypatch):
    config = toy_config(checkpoint_every=3, validate_every=0)
    make_batch = ToyTask.loss

    def loss(self, params, fixed, batch, rng):
        value, metrics = make_batch(self, params, fixed, batch, rng)
        return value / (batch["tokens"].shape[1] - 5), metrics  # by 0 in the second stage

    monkeypatch.setattr(ToyTask, "loss", loss)
    with pytest.raises(EngineError, match=r"the loss of step 6 is (-?inf|nan); lower learning_rate"):
        train_and_evaluate(config, tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3"]


def test_metrics_go_to_tensorboard_where_it_is(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, path, purge_step):
            calls.append((path, purge_step))

        def add_scalar(self, *values):
            calls.append(values)

        def close(self):
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 2)
    writer.write(3, {"length": 8, "loss": 0.5})
    writer.close()
    assert calls == [(str(tmp_path / "tensorboard"), 3), ("loss", 0.5, 3), "closed"]


def test_metrics_go_on_after_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    writer = MetricsWriter(path, 2)
    writer.write(3, {"loss": 0.5})
    writer.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 3.0), (2, 2.0), (3, 0.5)]
