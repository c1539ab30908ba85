"""What a run refuses: in one sentence, with all that was saved left as it was."""

import dataclasses
import errno
import json
import os
import re
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments.engine.errors import EngineError
from experiments.engine.run import load_variables, train_and_evaluate
from experiments.engine.workdir import locked
from tests.experiments.engine.helpers import assert_refuses, snapshot
from tests.experiments.engine.toy import STAGES, ToyTask, toy_config

CONFIG = toy_config(stages=STAGES[:1], validate_every=3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    train_and_evaluate(CONFIG, workdir)
    return workdir


@pytest.fixture
def workdir(finished, tmp_path):
    """A copy of the work dir of a run, without its results."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    (copy / "results.json").unlink()
    return copy


FILES = {
    "arrays": "variables/**/d/*",
    "index of the arrays": "variables/manifest.ocdbt",
    "list of the leaves": "contents/metadata",
    "tree": "variables/_METADATA",
    "score": "metrics/metrics",
}


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_checkpoint(name, workdir):
    for path in (workdir / "checkpoints" / "4").glob(FILES[name]):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    place = str(workdir / "checkpoints") + ("" if name == "score" else "/4")
    for call in (lambda: train_and_evaluate(CONFIG, workdir), lambda: load_variables(ToyTask(), workdir)):
        assert_refuses(call, workdir, f"the checkpoint {place} is damaged", "another --workdir")


@pytest.mark.parametrize("item", ["variables", "contents"])
def test_a_checkpoint_without_an_item(item, workdir):
    shutil.rmtree(workdir / "checkpoints" / "4" / item)
    assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, "checkpoints/4 is damaged", "--workdir")


def test_a_checkpoint_in_the_middle_of_training_is_checked_as_well(workdir):
    shutil.rmtree(workdir / "checkpoints" / "4")
    shutil.rmtree(workdir / "checkpoints" / "3" / "training")
    assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, "checkpoints/3 is damaged")


def test_a_value_that_is_not_the_saved_one(workdir, monkeypatch):
    restore = ocp.CheckpointManager.restore

    def flip_a_bit(self, step, args):
        restored = restore(self, step, args=args)
        if "variables" in restored:
            restored["variables"]["params"]["out"]["bias"].view(np.uint8)[3] ^= 16
        return restored

    monkeypatch.setattr(ocp.CheckpointManager, "restore", flip_a_bit)
    text = "checkpoints/4 is damaged or foreign (the checksum of params/out/bias is wrong)"
    assert_refuses(lambda: load_variables(ToyTask(), workdir), workdir, text)


def test_a_checkpoint_that_was_moved_away_is_done_again(workdir, finished):
    shutil.rmtree(workdir / "checkpoints" / "4")
    train_and_evaluate(CONFIG, workdir)
    for name in ("metrics.jsonl", "results.json"):
        assert (workdir / name).read_bytes() == (finished / name).read_bytes()


def test_a_directory_of_something_else(workdir):
    (workdir / "config.json").unlink()
    for call in (lambda: train_and_evaluate(CONFIG, workdir), lambda: load_variables(ToyTask(), workdir)):
        assert_refuses(call, workdir, f"{workdir} has checkpoints but no config.json", "take another --workdir")


def test_a_checkpoint_of_another_run(workdir, tmp_path):
    other = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, seed=1))
    train_and_evaluate(other, tmp_path / "other")
    shutil.rmtree(workdir / "checkpoints" / "4")
    shutil.rmtree(workdir / "checkpoints" / "3")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "3", workdir / "checkpoints" / "3")
    assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, "checkpoints/3", "by a run of another config")


def test_a_checkpoint_of_another_model(workdir):
    @dataclasses.dataclass(frozen=True)
    class WithoutHashes(ToyTask):
        def init(self, rng):
            return {"params": super().init(rng)["params"]}

    @dataclasses.dataclass(frozen=True)
    class Larger(ToyTask):
        def init(self, rng):
            variables = super().init(rng)
            return {**variables, "more": variables["hashes"]}

    for task, difference in (
        (ToyTask(width=5), "its hashes/planes is float32[8], the model's float32[5]"),
        (WithoutHashes(), "it has hashes/planes, which the model does not have"),
        (Larger(), "it has no more/planes"),
    ):
        call = lambda task=task: load_variables(task, workdir)  # noqa: E731
        assert_refuses(call, workdir, "checkpoints/4", difference, "another --workdir")


@pytest.mark.parametrize("name", ["config.json", "results.json"])
def test_a_file_that_is_no_json(name, workdir):
    (workdir / name).write_text('{"config": ')
    assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, str(workdir / name), "is damaged")


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        (toy_config(ToyTask(width=9)), "task.width = 8, and here task.width = 9"),
        (toy_config(learning_rate=0.1), "train.learning_rate = 0.003, and here train.learning_rate = 0.1"),
        (
            toy_config(stages=(STAGES[0], dataclasses.replace(STAGES[1], length=6))),
            "train.stages[1].length = 5, and here train.stages[1].length = 6",
        ),
        (toy_config(stages=STAGES[:1]), "train.stages = [{"),
    ],
)
def test_another_config(config, difference, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": toy_config().to_json(), "versions": {}}))
    for flags in ({}, {"resume": True}, {"eval_only": True}):
        call = lambda flags=flags: train_and_evaluate(config, tmp_path, **flags)  # noqa: E731
        assert_refuses(call, tmp_path, f"{tmp_path} belongs to a run with {difference}", "take another --workdir")


def test_nothing_to_go_on_from(tmp_path):
    for flag in ("resume", "eval_only"):
        new = tmp_path / flag
        call = lambda flag=flag, new=new: train_and_evaluate(CONFIG, new, **{flag: True})  # noqa: E731
        assert_refuses(call, tmp_path, f"{new} has no checkpoint, which --{flag.replace('_', '-')} needs")
        assert not new.exists()
    with pytest.raises(EngineError, match="has no checkpoint; train first"):
        load_variables(ToyTask(), tmp_path / "new")


def test_evaluation_before_the_end_of_training(workdir):
    shutil.rmtree(workdir / "checkpoints" / "4")
    call = lambda: train_and_evaluate(CONFIG, workdir, eval_only=True)  # noqa: E731
    assert_refuses(call, workdir, "is that of step 3 of 4; train to the end without --eval-only")


def test_batches_that_do_not_split(tmp_path):
    config = toy_config(stages=(dataclasses.replace(STAGES[0], batch_size=3),))
    assert_refuses(lambda: train_and_evaluate(config, tmp_path / "new"), tmp_path, "batch_size is 3", "multiple of 2")
    assert not (tmp_path / "new").exists()


def test_two_runs_at_once(workdir):
    with locked(workdir):
        assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, f"another run is at work in {workdir}")


def test_a_work_dir_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("mine")
    call = lambda: train_and_evaluate(CONFIG, tmp_path / "file" / "run")  # noqa: E731
    assert_refuses(call, tmp_path, f"{tmp_path}/file/run", "cannot be used", "another --workdir")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_work_dir_that_is_read_only(workdir):
    (workdir / "checkpoints").chmod(0o500)
    shutil.rmtree(workdir / "checkpoints" / "4", ignore_errors=True)
    assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, "checkpoints", "give access")


@pytest.mark.parametrize("when", ["at once", "in the background"])
def test_a_full_disk_keeps_what_was_saved(when, workdir, monkeypatch, finished):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shutil.rmtree(workdir / "checkpoints" / "4")
    saved = snapshot(workdir / "checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save" if when == "at once" else "wait_until_finished", full)
        with pytest.raises(EngineError) as error:
            train_and_evaluate(CONFIG, workdir)
    assert re.fullmatch(
        r"no checkpoint can be written to .*/checkpoints \(.*No space left on device\); the checkpoint of step 3 is "
        r"kept: make room or give access and run the same command again",
        str(error.value),
    )
    assert snapshot(workdir / "checkpoints").items() >= saved.items()
    train_and_evaluate(CONFIG, workdir)
    for name in ("metrics.jsonl", "results.json"):
        assert (workdir / name).read_bytes() == (finished / name).read_bytes()


def test_a_full_disk_for_metrics_and_results(workdir, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert_refused_partly(lambda: train_and_evaluate(CONFIG, workdir), workdir)


def assert_refused_partly(call, workdir):
    saved = snapshot(workdir)
    with pytest.raises(EngineError, match=r"results.json cannot be used \(No space left on device\); make room"):
        call()
    assert snapshot(workdir).items() >= saved.items()
    assert not (workdir / "results.json").exists()
