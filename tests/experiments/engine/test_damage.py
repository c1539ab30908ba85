"""Damaged files of a work dir are refused in one sentence and left as they are; older work dirs stay usable."""

import json
import re
import shutil

import pytest

from experiments.engine.errors import EngineError
from experiments.engine.metrics import read_metrics
from experiments.engine.run import train_and_evaluate
from experiments.engine.stopwatch import Stopwatch
from tests.experiments.engine.helpers import assert_refuses, snapshot
from tests.experiments.engine.toy import toy_config

CONFIG = toy_config()  # Lines of steps 2, 4, 6, 8 and 10; checkpoints of steps 4 and 10 are kept.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    train_and_evaluate(CONFIG, workdir)
    return workdir


@pytest.fixture
def workdir(finished, tmp_path):
    """A copy of the work directory of a finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def replace_line(index, text):
    def damage(lines):
        lines[index] = text

    return damage


def edit_number(lines):
    """Changes a digit of the loss of step 4."""
    line = re.sub(r'("loss": \d+\.)(\d)', lambda match: f"{match[1]}{(int(match[2]) + 1) % 10}", lines[1])
    assert line != lines[1]
    lines[1] = line


def remove_check(lines):
    lines[1] = re.sub(r', "check": "\w+"', "", lines[1])


def swap(lines):
    lines[0], lines[1] = lines[1], lines[0]


EARLY_DAMAGES = {  # of lines of steps 2 and 4
    "a null step": (replace_line(1, '{"step": null}'), "line 2"),
    "a step that is text": (replace_line(1, '{"step": "4"}'), "line 2"),
    "a list": (replace_line(0, "[1]"), "line 1"),
    "no JSON": (replace_line(1, "\x00\x00\x00"), "line 2"),
    "an empty line": (replace_line(1, ""), "line 2"),
    "an edited number": (edit_number, "line 2"),
    "an edited number without its checksum": (lambda lines: (edit_number(lines), remove_check(lines)), "line 2"),
    "a lost line": (lambda lines: lines.pop(0), "line 1"),
    "swapped lines": (swap, "line 1"),
    "a line twice": (lambda lines: lines.insert(1, lines[0]), "line 2"),
    "an empty file": (lambda lines: lines.clear(), "step 2 is missing"),
}
LATE_DAMAGES = {  # of lines after step 4
    "a lost last line": (lambda lines: lines.pop(), "step 10 is missing"),
    "a cut last line": (replace_line(4, '{"step": 10, "lo'), "line 5"),
    "a foreign line": (lambda lines: lines.append('{"step": 12, "loss": 1.0}'), "line 6"),
    "a null step": (replace_line(3, '{"step": null}'), "line 4"),
    "a lost line": (lambda lines: lines.pop(2), "line 3"),
}


def damage_metrics(workdir, damage):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    damage(lines)
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("name", [*EARLY_DAMAGES, *(f"late: {name}" for name in LATE_DAMAGES)])
def test_damaged_metrics_of_a_finished_run_are_refused(name, workdir):
    damage, text = LATE_DAMAGES[name.removeprefix("late: ")] if "late: " in name else EARLY_DAMAGES[name]
    damage_metrics(workdir, damage)
    call = lambda: train_and_evaluate(CONFIG, workdir)  # noqa: E731
    assert_refuses(call, workdir, f"{workdir}/metrics.jsonl is damaged", text, "nothing was changed", "--workdir")


@pytest.mark.parametrize("name", EARLY_DAMAGES)
def test_damaged_metrics_of_an_interrupted_run_are_refused(name, workdir):
    shutil.rmtree(workdir / "checkpoints" / "10")
    damage, text = EARLY_DAMAGES[name]
    damage_metrics(workdir, damage)
    call = lambda: train_and_evaluate(CONFIG, workdir)  # noqa: E731
    assert_refuses(call, workdir, f"{workdir}/metrics.jsonl is damaged", text)


@pytest.mark.parametrize("name", LATE_DAMAGES)
def test_lines_after_the_checkpoint_are_written_again(name, workdir, finished):
    shutil.rmtree(workdir / "checkpoints" / "10")
    damage_metrics(workdir, LATE_DAMAGES[name][0])
    train_and_evaluate(CONFIG, workdir)
    assert (workdir / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_truncated_end_is_normal_after_a_crash(cut, workdir, finished):
    shutil.rmtree(workdir / "checkpoints" / "10")
    path = workdir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    train_and_evaluate(CONFIG, workdir)
    assert path.read_bytes() == (finished / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("is_finished", [True, False])
def test_missing_metrics_are_refused(is_finished, workdir):
    (workdir / "metrics.jsonl").unlink()
    if not is_finished:
        shutil.rmtree(workdir / "checkpoints" / "10")
    call = lambda: train_and_evaluate(CONFIG, workdir)  # noqa: E731
    assert_refuses(call, workdir, f"{workdir}/metrics.jsonl is missing", "nothing was changed", "checkpoints away")


def test_the_ways_out_of_damaged_metrics(workdir, finished):
    """The run starts again when its checkpoints are moved away, and ends with the same files."""
    (workdir / "metrics.jsonl").unlink()
    shutil.rmtree(workdir / "checkpoints")
    train_and_evaluate(CONFIG, workdir)
    for name in ("metrics.jsonl", "results.json"):
        assert (workdir / name).read_bytes() == (finished / name).read_bytes()


def edit_results(workdir, edit):
    path = workdir / "results.json"
    stored = json.loads(path.read_text())
    edit(stored)
    path.write_text(json.dumps(stored))


RESULT_DAMAGES = {
    "an edited number": lambda stored: stored["rows"][0].update(sum=1.0),
    "a lost row": lambda stored: stored["rows"].pop(),
    "a foreign row": lambda stored: stored["rows"].append({"token": 1}),
    "no rows": lambda stored: stored.pop("rows"),
    "rows that are null": lambda stored: stored.update(rows=None),
    "an edited evaluation": lambda stored: stored["done"][0]["spec"].update(token=5),
    "a lost evaluation": lambda stored: stored["done"].pop(),
    "no config": lambda stored: stored.pop("config"),
    "other versions": lambda stored: stored["versions"].update(jax="0"),
}


@pytest.mark.parametrize("name", RESULT_DAMAGES)
def test_damaged_results_are_refused(name, workdir):
    edit_results(workdir, RESULT_DAMAGES[name])
    call = lambda: train_and_evaluate(CONFIG, workdir)  # noqa: E731
    assert_refuses(call, workdir, f"{workdir}/results.json is damaged", "move it away to evaluate again")


@pytest.mark.parametrize("is_older", [True, False])
def test_results_of_another_run_are_refused(is_older, workdir, tmp_path):
    train_and_evaluate(toy_config(seed=1), tmp_path / "other")
    shutil.copy(tmp_path / "other/results.json", workdir)
    if is_older:
        edit_results(workdir, lambda stored: stored.pop("check"))
    texts = (
        "results.json belongs to a run with train.seed = 1, and here train.seed = 0",
        "move it away to evaluate again",
    )
    assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, *texts)


def test_results_that_are_no_object_are_refused(workdir):
    (workdir / "results.json").write_text("[]")
    assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, "results.json is damaged")


def test_results_that_were_moved_away_are_evaluated_again(workdir, finished):
    (workdir / "results.json").unlink()
    train_and_evaluate(CONFIG, workdir)
    assert (workdir / "results.json").read_bytes() == (finished / "results.json").read_bytes()


def make_older(workdir):
    """Removes all checksums, as in work dirs that were written before there were any."""
    path = workdir / "metrics.jsonl"
    text, count = re.subn(r', "check": "\w+"\}', "}", path.read_text())
    assert count == 5
    path.write_text(text)
    for name in ("results.json", "time.json"):
        stored = json.loads((workdir / name).read_text())
        del stored["check"]
        (workdir / name).write_text(json.dumps(stored))


def test_a_finished_run_without_checksums_is_usable(workdir, finished):
    make_older(workdir)
    before = snapshot(workdir)
    rows = json.loads((finished / "results.json").read_text())["rows"]
    assert train_and_evaluate(CONFIG, workdir) == rows
    assert snapshot(workdir) == before
    assert read_metrics(workdir / "metrics.jsonl") == read_metrics(finished / "metrics.jsonl")


def test_an_interrupted_run_without_checksums_goes_on(workdir, finished):
    make_older(workdir)
    shutil.rmtree(workdir / "checkpoints" / "10")
    (workdir / "results.json").unlink()
    train_and_evaluate(CONFIG, workdir)
    assert (workdir / "results.json").read_bytes() == (finished / "results.json").read_bytes()
    assert read_metrics(workdir / "metrics.jsonl") == read_metrics(finished / "metrics.jsonl")
    train_and_evaluate(CONFIG, workdir)


@pytest.mark.parametrize("name", ["a lost row", "a foreign row", "no rows", "rows that are null", "no config"])
def test_older_results_are_checked_as_far_as_they_can_be(name, workdir):
    make_older(workdir)
    edit_results(workdir, RESULT_DAMAGES[name])
    assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, "results.json is damaged")


@pytest.mark.parametrize("name", ["a null step", "a lost line", "swapped lines", "a line twice"])
def test_older_metrics_are_checked_as_far_as_they_can_be(name, workdir):
    make_older(workdir)
    damage_metrics(workdir, EARLY_DAMAGES[name][0])
    assert_refuses(lambda: train_and_evaluate(CONFIG, workdir), workdir, "metrics.jsonl is damaged")


@pytest.mark.parametrize("text", ["[]", '{"seconds": 1.0}', '{"seconds": "x", "waited": 0}', '{"seconds": NaN,'])
def test_a_damaged_time_is_refused(text, tmp_path):
    (tmp_path / "time.json").write_text(text)
    assert_refuses(lambda: Stopwatch(tmp_path / "time.json", 3), tmp_path, "time.json is damaged", "move it away")


def test_an_edited_time_is_refused(workdir):
    path = workdir / "time.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 1.0}))
    with pytest.raises(EngineError, match=r"time.json is damaged \(its checksum is wrong\)"):
        Stopwatch(path, 3)
