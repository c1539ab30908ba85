"""A run that dies at any moment, and goes on, ends as one that did not: bit for bit."""

import json
import os
import shutil
import signal

import pytest

from experiments.engine.progress import Progress
from experiments.engine.run import train_and_evaluate
from experiments.engine.signals import Stop
from tests.experiments.engine.crash import MOMENTS
from tests.experiments.engine.helpers import assert_same_bits, last_state, python
from tests.experiments.engine.toy import ToyTask, toy_config

CONFIG = toy_config(ToyTask(noise=0.1))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    train_and_evaluate(CONFIG, workdir)
    return workdir


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("killed")
    process = python("-m", "tests.experiments.engine.crash", workdir)
    assert process.out.splitlines() == [f"{moment}: {-signal.SIGKILL}" for moment in MOMENTS], process.err
    return workdir


def assert_same_run(workdir, undisturbed):
    for name in ("metrics.jsonl", "results.json", "config.json"):
        assert (workdir / name).read_bytes() == (undisturbed / name).read_bytes()
    assert_same_bits(last_state(CONFIG, workdir), last_state(CONFIG, undisturbed))
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["10", "4"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(moment, killed, undisturbed):
    workdir = killed / moment
    names = {path.name for path in (workdir / "checkpoints").iterdir()}
    if "save" in moment:
        assert "6.orbax-checkpoint-tmp" in names
        assert "6" not in names
    if moment == "deletion":
        assert names == {"3", "4"}
    train_and_evaluate(CONFIG, workdir, resume=True)
    assert_same_run(workdir, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_and_saves(number, tmp_path, undisturbed, monkeypatch, capsys):
    update = Progress.update
    before = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]

    def signalled(self, done, loss):
        if done == 5:
            os.kill(os.getpid(), number)
        update(self, done, loss)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", signalled)
        with pytest.raises(Stop) as stop:
            train_and_evaluate(CONFIG, tmp_path)
    assert stop.value.code == 128 + number
    assert [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)] == before
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"stopped by {number.name}; all is saved in {tmp_path}: run the same command again")
    assert "5" in {path.name for path in (tmp_path / "checkpoints").iterdir()}
    train_and_evaluate(CONFIG, tmp_path)
    assert_same_run(tmp_path, undisturbed)


def test_a_signal_in_the_last_validation_is_not_lost(tmp_path, undisturbed, monkeypatch):
    validate = ToyTask.validate

    def interrupted(self, variables):
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(self, variables)

    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    (tmp_path / "results.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints" / "10")
    with monkeypatch.context() as patch:
        patch.setattr(ToyTask, "validate", interrupted)
        for _ in range(2):  # after steps 8 and 10
            with pytest.raises(Stop):
                train_and_evaluate(CONFIG, tmp_path)
    assert not (tmp_path / "results.json").exists()
    train_and_evaluate(CONFIG, tmp_path, eval_only=True)
    assert_same_run(tmp_path, undisturbed)


def test_a_signal_ends_an_evaluation_at_once(tmp_path, undisturbed, monkeypatch):
    evaluate = ToyTask.evaluate

    def interrupted(self, variables, spec):
        if spec["token"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("this is not reached")
        return evaluate(self, variables, spec)

    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    (tmp_path / "results.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(ToyTask, "evaluate", interrupted)
        with pytest.raises(Stop):
            train_and_evaluate(CONFIG, tmp_path)
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 4
    train_and_evaluate(CONFIG, tmp_path, eval_only=True)
    assert_same_run(tmp_path, undisturbed)


def test_the_second_interrupt_kills():
    process = python(
        "-c",
        "import os, signal, time\n"
        "from experiments.engine.signals import StopSignals\n"
        "with StopSignals() as signals:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert signals.received == signal.SIGINT\n"
        "    print('one', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('two', flush=True)\n",
    )
    assert (process.out, process.returncode) == ("one\n", -signal.SIGINT)
