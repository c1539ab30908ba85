"""The report on the paper: which runs there are, its tables, and verdicts that follow from the rows alone."""

import importlib
import itertools
import json
import subprocess
import sys

import pytest

from experiments import claims, paper, published
from experiments.claims import FAILS, HOLDS, MISSING, UNDECIDED, judge, summarize
from experiments.engine.errors import EngineError
from experiments.engine.stats import difference_interval
from experiments.engine.suite import COMPARED
from tests.engine.helpers import assert_refused


def row(task, attention, accuracy, seed=0, n=2000, length=1024):
    return {
        "task": task,
        "attention": attention,
        "seed": seed,
        "preset": "cpu",
        "length": length,
        "steps": 500,
        "parameters": 1000,
        "train_accuracy": accuracy,
        "test_accuracy": accuracy,
        "n_test": n,
        "low": accuracy - 0.02,
        "high": accuracy + 0.02,
        "seconds": 61.0,
        "waited": 0.1,
    }


def needle(attention, accuracy, length=65536):
    return {
        "attention": attention,
        "accuracy": accuracy,
        "low": accuracy - 0.01,
        "high": accuracy + 0.01,
        "n": 100,
        "length": length,
        "train_length": 1024,
        "depth": None,
        "distractors": 0,
    }


def rows_of(accuracies, tasks=tuple(paper.TASKS), **changes):
    return [row(task, name, accuracy, **changes) for task in tasks for name, accuracy in accuracies.items()]


EQUAL = dict.fromkeys(COMPARED, 0.5)


def verdicts(rows, niah=()):
    return [verdict.verdict for verdict in judge(rows, list(niah))]


def test_every_row_of_the_paper_is_a_run():
    jobs = list(paper.jobs(tuple(paper.TASKS), COMPARED))
    assert len(jobs) == len(set(jobs)) == 10 * 5 + 2 * 2 * 2
    tasks = [task for table in published.TABLES.values() for task in table]
    assert sorted(tasks) == sorted(paper.TASKS)
    first = {(job.task, job.attention) for job in jobs if job.seed == 0}
    assert first == {(task, name) for task in tasks for name in COMPARED}
    more = [job for job in jobs if job.seed]
    assert {job.task for job in more} == {"imdb", "fashion_mnist"}
    assert {job.attention for job in more} == {"elsaa", "exact"}


def test_every_command_is_understood(tmp_path):
    """Each experiment's own parser takes what the driver gives it."""
    arguments = paper.make_parser().parse(["--steps", "3", "--data-dir", str(tmp_path)])
    for job in paper.jobs(tuple(paper.TASKS), ("exact",)):
        _, _, module, *flags = paper.command(job, tmp_path, arguments)
        parsed = importlib.import_module(module).make_parser().parse(flags)
        assert (parsed.attention, parsed.seed, parsed.steps) == (("exact",), job.seed, 3)
        assert parsed.workdir == tmp_path / job.task
        assert parsed.preset == "cpu"


def test_no_results(tmp_path):
    arguments = paper.make_parser().parse(["--workdir", str(tmp_path), "--niah", str(tmp_path)])
    with pytest.raises(EngineError, match="has no results yet; give --run to train"):
        paper.run(arguments)
    assert set(verdicts([])) == {MISSING}


def test_the_driver_runs_what_is_missing(tmp_path, monkeypatch, capsys):
    """It goes on after what is done, and stops where a run fails."""
    calls = []

    class Process:
        def __init__(self, words):
            calls.append(words)
            flags = dict(itertools.pairwise(words))
            self.code = 2 if flags["--attention"] == "race" and len(calls) == 2 else 0
            if not self.code:
                done = tmp_path / "runs/imdb" / f"{flags['--attention']}-{flags['--seed']}"
                done.mkdir(parents=True)
                stored = {"config": {"train": {"stages": [{"steps": 5}]}}, "rows": [row("imdb", "elsaa", 0.8)]}
                (done / "results.json").write_text(json.dumps(stored))
                (done / "time.json").write_text('{"seconds": 5, "waited": 0}')
                (done / "metrics.jsonl").write_text('{"step": 5, "layer_0/multiplier": 0.5, "layer_0/gate_sparse": 1}')

        def wait(self):
            return self.code

    monkeypatch.setattr(subprocess, "Popen", Process)
    flags = ["--run", "--tasks", "imdb", "--attention", "elsaa,race", "--workdir", str(tmp_path / "runs")]
    arguments = paper.make_parser().parse([*flags, "--out", str(tmp_path / "out"), "--niah", str(tmp_path)])
    with pytest.raises(EngineError, match=r"experiments.imdb .* ended with code 2; mend it and run the same command"):
        paper.run(arguments)
    assert [words[words.index("--attention") + 1] for words in calls] == ["elsaa", "race"]
    assert calls[0][:3] == [sys.executable, "-m", "experiments.imdb"]
    paper.run(arguments)
    assert [words[words.index("--seed") + 1] for words in calls[2:]] == ["0", "1", "2"]
    assert "4 of 4 runs are done" in capsys.readouterr().out
    assert paper.is_done(paper.Job("imdb", "race", 0), tmp_path / "runs", "cpu")
    assert not paper.is_done(paper.Job("imdb", "race", 0), tmp_path / "runs", "paper")
    text = (tmp_path / "out/paper.md").read_text()
    assert "75.93" in text
    assert "80.00" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "paper.md",
        "paper.json",
        "paper_accuracy.png",
        "paper_branches.png",
    }


def test_means_over_seeds():
    found = summarize([row("imdb", "elsaa", 0.8), row("imdb", "elsaa", 0.9, seed=1)])["imdb", "elsaa"]
    assert (found.accuracy, found.n, found.seeds) == (pytest.approx(0.85), 2000, 2)
    low, high = found.interval
    assert 0.83 < low < 0.85 < high < 0.87


def test_verdicts_follow_from_the_rows():
    multiplier, vision, text, exact, short, niah, causal_exact, causal_race = range(8)
    equal = verdicts(rows_of(EQUAL), [needle("elsaa", 0.9), needle("race", 0.9)])
    assert equal[multiplier] == equal[vision] == equal[text] == equal[causal_exact] == equal[causal_race] == UNDECIDED
    assert (equal[exact], equal[short], equal[niah]) == (UNDECIDED, UNDECIDED, FAILS)

    better = rows_of({**EQUAL, "elsaa": 0.6})
    found = verdicts(better, [needle("elsaa", 0.99), needle("race", 0.02)])
    assert found[multiplier] == found[vision] == found[causal_exact] == found[causal_race] == found[niah] == HOLDS
    assert (found[text], found[short]) == (FAILS, FAILS)
    worse = verdicts(rows_of({**EQUAL, "elsaa": 0.4}))
    assert worse[multiplier] == worse[vision] == worse[causal_exact] == worse[causal_race] == FAILS
    assert (worse[text], worse[niah]) == (HOLDS, MISSING)

    # The longest length that both have.
    both = [needle("elsaa", 0.99), needle("elsaa", 0.5, length=2**20), needle("race", 0.02)]
    assert verdicts([], both)[niah] == HOLDS
    short_ones = [needle(name, accuracy, length=1024) for name, accuracy in (("elsaa", 0.99), ("race", 0.02))]
    assert verdicts([], short_ones)[niah] == UNDECIDED
    assert verdicts([], both[1:])[niah] == MISSING

    long = rows_of({**EQUAL, "elsaa": 0.65}, ("retrieval",), length=64_000)
    assert verdicts(long)[exact] == HOLDS
    assert verdicts(rows_of({**EQUAL, "exact": 0.65}, ("retrieval",), length=64_000))[exact] == FAILS
    assert verdicts(rows_of(EQUAL, claims.SHORT, n=100_000))[short] == HOLDS


def test_intervals_of_differences():
    """Newcombe's example: 56 of 70 against 48 of 80."""
    low, high = difference_interval(56 / 70, 70, 48 / 80, 80)
    assert low == pytest.approx(0.0524, abs=2e-4)
    assert high == pytest.approx(0.3339, abs=2e-4)


def test_bad_tasks(capsys):
    wanted = "'cifar' is not known; use all, or some of fashion_mnist,imdb"
    assert_refused(paper.make_parser(), ["--tasks", "imdb,cifar"], wanted, capsys)
