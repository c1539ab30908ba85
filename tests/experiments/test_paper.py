"""The report on the paper: which runs there are, its tables, and verdicts that follow from the rows alone."""

import importlib
import json
import subprocess
import sys

import pytest

from experiments import imdb
from experiments.engine import report, suite
from experiments.engine.errors import EngineError
from experiments.engine.presets import COMPARED
from experiments.engine.stats import difference_interval, mean_interval, wilson_interval
from experiments.paper import claims, published
from experiments.paper import command as paper
from experiments.paper.claims import FAILS, HOLDS, MISSING, UNDECIDED, judge, summarize
from tests.experiments.engine.helpers import assert_refused


def row(task, attention, accuracy, seed=0, n=2000, length=1024):
    return {
        "task": task,
        "attention": attention,
        "seed": seed,
        "preset": "cpu",
        "length": length,
        "steps": 500,
        "batch_size": 8,
        "parameters": 1000,
        "train_accuracy": accuracy,
        "test_accuracy": accuracy,
        "n_test": n,
        "low": accuracy - 0.02,
        "high": accuracy + 0.02,
        "seconds": 61.0,
        "training_seconds": 50.0,
        "waited": 0.1,
    }


def needle(attention, accuracy, length=65536, n=100, **changes):
    low, high = wilson_interval(round(accuracy * n), n)
    return {
        "attention": attention,
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "n": n,
        "length": length,
        "train_length": 1024,
        "seed": 0,
        "seconds_per_example": 1.5,
        "depth": None,
        "needles": 1,
        "distractors": 0,
        **changes,
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
    assert sorted(published.LENGTHS) == sorted(tasks)
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
    """It goes on after what is done and after a run that fails, which it tells in the end."""
    calls = []

    class Process:
        def __init__(self, words, env):
            assert env["GLIBC_TUNABLES"]
            calls.append(words)
            attention, seed = (words[words.index(flag) + 1] for flag in ("--attention", "--seed"))
            self.code = 2 if attention == "race" and len(calls) == 2 else 0
            if not self.code:
                done = tmp_path / "runs/imdb" / f"{attention}-{seed}"
                done.mkdir(parents=True)
                own = suite.make_parser("").parse(words[3:])
                config = suite.run_config("imdb", "cpu", imdb.PRESETS["cpu"], attention, own).to_json()
                evaluated = row("imdb", attention, 0.8, int(seed)) | {"evaluation_seconds": 11.0}
                stored = {"config": config, "rows": [evaluated]}
                (done / "results.json").write_text(json.dumps(stored))
                (done / "time.json").write_text('{"seconds": 5, "waited": 0}')
                (done / "metrics.jsonl").write_text('{"step": 5, "layer_0/multiplier": 0.5, "layer_0/gate_sparse": 1}')

        def wait(self):
            return self.code

    monkeypatch.setattr(subprocess, "Popen", Process)
    flags = ["--run", "--tasks", "imdb", "--attention", "elsaa,race", "--workdir", str(tmp_path / "runs")]
    arguments = paper.make_parser().parse([*flags, "--out", str(tmp_path / "out"), "--niah", str(tmp_path)])
    with pytest.raises(EngineError, match=r"1 runs failed \(imdb race 0\); correct what they report and run the same"):
        paper.run(arguments)
    assert [words[words.index("--attention") + 1] for words in calls] == ["elsaa", "race", "elsaa", "elsaa"]
    assert calls[0][:3] == [sys.executable, "-m", "experiments.imdb"]
    printed = capsys.readouterr().out
    assert "experiments.imdb --attention race" in printed
    assert "3 of 4 runs are done" in printed
    paper.run(arguments)
    assert [words[words.index("--seed") + 1] for words in calls[4:]] == ["0"]
    assert "4 of 4 runs are done" in capsys.readouterr().out
    # Results of another budget are not taken for those that are wanted.
    fewer = paper.make_parser().parse([*flags, "--steps", "3"])
    job = paper.Job("imdb", "race", 0)
    assert paper.is_done(job, tmp_path / "runs", arguments)
    assert not paper.is_done(job, tmp_path / "runs", fewer)
    text = (tmp_path / "out/paper.md").read_text()
    assert "500 x 8" not in text  # of the config, not of the row
    assert f"{imdb.PRESETS['cpu'].steps} x {imdb.PRESETS['cpu'].batch_size}" in text
    assert "75.93" in text
    assert "80.00" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "paper.md",
        "paper.json",
        "paper_accuracy.png",
        "paper_branches.png",
    }


def test_rows_of_one_budget_alone_are_compared(tmp_path):
    def write(task, attention, seed=0, batch_size=8):
        config = {
            "task": {"attention": attention, "seed": seed, "sizes": {"width": 64}},
            "train": {"seed": seed, "stages": [{"batch_size": batch_size}]},
        }
        directory = report.run_directory(tmp_path / task, attention, seed)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "results.json").write_text(json.dumps({"config": config}))

    for task, attention, seed in (("imdb", "elsaa", 0), ("imdb", "elsaa", 1), ("imdb", "exact", 0)):
        write(task, attention, seed)
    write("retrieval", "exact", batch_size=4)
    alike = [row("imdb", "elsaa", 0.8), row("imdb", "elsaa", 0.8, 1), row("retrieval", "exact", 0.8, n=20)]
    paper.check_budgets([*alike, row("imdb", "exact", 0.7)], tmp_path)
    with pytest.raises(EngineError, match=r"the runs of imdb in .* have n_test = 2000 and 20, and only those of one"):
        paper.check_budgets([*alike, row("imdb", "exact", 0.8, n=20)], tmp_path)
    write("imdb", "exact", batch_size=32)
    wanted = r"the runs of imdb in .* have train.stages\[0\].batch_size = 8 and 32, and only those of one"
    with pytest.raises(EngineError, match=wanted):
        paper.check_budgets([*alike, row("imdb", "exact", 0.7)], tmp_path)


def test_a_work_dir_of_something_else(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"rows": [row("imdb", "elsaa", 0.8)]}))
    arguments = paper.make_parser().parse(["--workdir", str(tmp_path), "--niah", str(tmp_path)])
    with pytest.raises(EngineError, match="is not of needle in a haystack; give its work dir as --niah"):
        paper.run(arguments)
    inner = tmp_path / "imdb/elsaa-0"
    inner.mkdir(parents=True)
    (inner / "results.json").write_text(json.dumps({"rows": [{"speed": 3}]}))
    assert report.collect(tmp_path / "imdb") == []


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"config": {}}, "its 'rows' are missing"),
        ({"rows": [{"train_length": 1024}]}, "row 1 has no 'attention'"),
        ({"rows": [], "check": "00000000"}, "its checksum is wrong"),
    ],
)
def test_damaged_results_of_needle_in_a_haystack(stored, message, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(stored))
    arguments = paper.make_parser().parse(["--workdir", str(tmp_path), "--niah", str(tmp_path)])
    with pytest.raises(EngineError, match=rf"results.json is damaged \({message}.*; run python -m experiments.niah"):
        paper.run(arguments)


def test_damaged_results_of_a_run(tmp_path):
    path = report.run_directory(tmp_path / "imdb", "elsaa", 0) / "results.json"
    path.parent.mkdir(parents=True)
    arguments = paper.make_parser().parse([])
    for stored in ({}, [], {"rows": None}):
        path.write_text(json.dumps(stored))
        with pytest.raises(EngineError, match=r"results.json is damaged .*move it away to evaluate again"):
            paper.is_done(paper.Job("imdb", "elsaa", 0), tmp_path, arguments)
    path.write_text(json.dumps({"rows": [row("imdb", "elsaa", 0.8)]}))
    assert not paper.is_done(paper.Job("imdb", "elsaa", 0), tmp_path, arguments)
    with pytest.raises(EngineError, match="it has no config of a run"):
        paper.check_budgets([row("imdb", "elsaa", 0.8)], tmp_path)


def test_intervals_hold_examples_and_seeds():
    one = summarize([row("imdb", "elsaa", 0.8)])["imdb", "elsaa"]
    assert one.interval == wilson_interval(1600, 2000)
    seeds = [row("imdb", "elsaa", value, seed) for seed, value in enumerate((0.80, 0.86, 0.80))]
    found = summarize([*seeds, row("retrieval", "race", 0.82), row("tiny_imagenet", "race", 0.02)])
    several, single = found["imdb", "elsaa"], found["retrieval", "race"]
    assert (several.accuracy, several.n, several.seeds) == (pytest.approx(0.82), 2000, 3)
    mean, low, _ = mean_interval([0.80, 0.86, 0.80])  # by Student's t with two degrees of freedom
    assert several.seed_error == pytest.approx(mean - low)
    assert single.seed_error == pytest.approx((mean - low) * 3**0.5)  # as much a seed, and but one
    assert several.interval[0] < low
    rare = found["tiny_imagenet", "race"]
    assert rare.seed_error == pytest.approx(single.seed_error * (0.02 * 0.98 / (0.82 * 0.18)) ** 0.5)
    assert rare.interval[0] == 0
    assert one - one == (0, *difference_interval(0.8, one.interval, 0.8, one.interval))


def test_verdicts_follow_from_the_rows():
    multiplier, vision, text, exact, short, niah, causal_exact, causal_race = range(8)
    equal = verdicts(rows_of(EQUAL), [needle("elsaa", 0.9), needle("race", 0.9)])
    assert equal[multiplier] == equal[vision] == equal[text] == equal[causal_exact] == equal[causal_race] == UNDECIDED
    assert (equal[exact], equal[short], equal[niah]) == (UNDECIDED, UNDECIDED, FAILS)
    evidence = judge(rows_of(EQUAL), [])[multiplier].evidence
    assert "at 1,024 tokens, in the paper 16,384 to 32,000" in evidence

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
    # Few examples, and needles that are found less often than not, prove nothing.
    assert verdicts([], [needle("elsaa", 0.9, n=10), needle("race", 0.6, n=10)])[niah] == UNDECIDED
    assert verdicts([], [needle("elsaa", 0.2), needle("race", 0.02)])[niah] == FAILS
    # Rows of several needles, or of fewer examples, do not take the place of the others.
    others = [needle("elsaa", 0.1, needles=8), needle("elsaa", 0.1, n=10), needle("elsaa", 0.1, distractors=4)]
    assert claims.needle_rows([*both, *others]) == claims.needle_rows(both)

    long = rows_of({**EQUAL, "elsaa": 0.65}, ("retrieval",), length=64_000)
    assert verdicts(long)[exact] == HOLDS
    assert verdicts(rows_of({**EQUAL, "exact": 0.65}, ("retrieval",), length=64_000))[exact] == FAILS
    assert verdicts(rows_of({**EQUAL, "elsaa": 0.65}, ("retrieval",), n=100, length=64_000))[exact] == UNDECIDED
    close = {**EQUAL, "exact": 0.517, "elsaa": 0.533}
    assert verdicts(rows_of(close, ("retrieval",), n=1000, length=64_000))[exact] == UNDECIDED
    mixed = [row("retrieval", "exact", 0.5, length=1024), row("retrieval", "elsaa", 0.65, length=64_000)]
    assert verdicts(mixed)[exact] == UNDECIDED
    assert verdicts(rows_of(EQUAL, claims.SHORT, n=100_000))[short] == HOLDS


def test_intervals_of_differences():
    """Newcombe's example: 56 of 70 against 48 of 80."""
    low, high = difference_interval(56 / 70, wilson_interval(56, 70), 48 / 80, wilson_interval(48, 80))
    assert low == pytest.approx(0.0524, abs=2e-4)
    assert high == pytest.approx(0.3339, abs=2e-4)


def test_bad_tasks(capsys):
    wanted = "'cifar' is not known; use all, or some of fashion_mnist,imdb"
    assert_refused(paper.make_parser(), ["--tasks", "imdb,cifar"], wanted, capsys)
