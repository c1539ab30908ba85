"""The benchmark: what it counts, what it predicts, and the whole of it in small."""

import dataclasses
import json

import jax
import pytest

from experiments.benchmark import command as benchmark
from experiments.benchmark import contenders as contenders_module
from experiments.benchmark import report, turns
from experiments.benchmark.contenders import Case, contenders
from experiments.engine.errors import EngineError
from tests.experiments.engine.helpers import assert_refused

SMALL = ["--attention", "exact,jax_sdpa", "--modes", "forward", "--length", "512", "--steps", "1"]


def run(workdir, *flags):
    return benchmark.run(benchmark.make_parser().parse([*SMALL, "--workdir", str(workdir), *flags]))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("benchmark")
    return workdir, run(workdir)


def test_the_whole_in_small(measured, capsys):
    workdir, rows = measured
    assert [row["attention"] for row in rows] == ["exact", "jax_sdpa", "matmul"]
    for row in rows:
        assert 0 < row["low"] <= row["seconds"] <= row["high"]
        assert row["n"] >= 1
        assert row["peak_bytes"] > 0
        assert row["gflops"] == pytest.approx(
            contenders()[row["attention"]].gflops(Case(512, False, False), row["seconds"])
        )
    assert rows[-1]["share_of_peak"] == 1
    assert json.loads((workdir / "results.json").read_text())["rows"] == rows
    assert {path.name for path in workdir.glob("*.png")} == {"time.png", "memory.png", "peak.png"}

    # What was measured is not measured again.
    assert run(workdir) == rows
    assert "512" in capsys.readouterr().out


def test_other_settings_are_refused(measured):
    with pytest.raises(EngineError, match=r"other settings.*take another --workdir"):
        run(measured[0], "--steps", "2")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda stored: stored["rows"][0].update(seconds=1e-9), "its checksum is wrong"),
        (lambda stored: (stored.pop("check"), stored.pop("rows")), "its 'rows' are missing"),
        (lambda stored: (stored.pop("check"), stored["rows"][0].pop("length")), "row 1 has no 'length'"),
    ],
)
def test_damaged_results_are_refused(edit, message, measured, tmp_path):
    stored = json.loads((measured[0] / "results.json").read_text())
    edit(stored)
    (tmp_path / "results.json").write_text(json.dumps(stored))
    with pytest.raises(EngineError, match=rf"results.json is damaged \({message}.*; move it away to measure again"):
        run(tmp_path)


def test_resume_needs_something_to_go_on_with(tmp_path):
    with pytest.raises(EngineError, match="--resume was given"):
        run(tmp_path, "--resume")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--modes", "sideways"], "'sideways' is not known; use all, or some of forward"),
        (["--length", "100"], "'100' is not an integer >= 512"),
        (["--attention", "flash"], "'flash' is not known"),
    ],
)
def test_a_bad_flag_is_one_line(flags, message, capsys):
    assert_refused(benchmark.make_parser(), flags, message, capsys)


def test_operations():
    """By hand, for one head of 64: 4 N^2 H; blocks of 256; 4 tables of 4 bits, that is 64 buckets and 16 planes."""
    known, case = contenders(), Case(4096, causal=False, backward=False)
    sparse = 4 * 64 * 4096 * 256 + 4 * 4096 * 12 * 64
    low_rank = 4 * 4096 * 16 * 64 + 4 * 4096 * 64 * 65
    assert known["exact"].operations(case) == 4 * 64 * 4096**2
    assert known["sort_lsh"].operations(case) == sparse
    assert known["race"].operations(case) == low_rank
    assert known["elsaa"].operations(case) == sparse + low_rank
    assert known["exact"].gflops(case, 2.0) == pytest.approx(4 * 4 * 64 * 4096**2 / 2e9)
    causal = dataclasses.replace(case, causal=True)
    # 16 stretches of 256; then 4 levels, in which half of the queries meet 64 keys each.
    assert known["sort_lsh"].operations(causal) == 256 * (4096 * 257 / 2 + 4 * 2048 * 64) + 4 * 4096 * 12 * 64


def rows_of(name, times):
    return [{"attention": name, "length": 512 << i, "seconds": s} for i, s in enumerate(times)]


@pytest.mark.parametrize(
    ("ours", "theirs", "length"),
    [
        ([2, 3, 4], [1, 4, 16], 1024),
        ([1, 2, 4], [2, 4, 8], 512),
        ([1, 9, 4], [2, 4, 8], 2048),  # Faster once, and then not: it does not count.
        ([2, 4, 9], [1, 2, 8], None),
        ([2, 3, 4, 5], [1, 4, 16], 1024),  # Where the other was not run, nothing is claimed.
    ],
)
def test_crossover(ours, theirs, length):
    assert report.crossover(rows_of("elsaa", ours) + rows_of("exact", theirs), "elsaa", "exact") == length


@pytest.mark.parametrize(
    ("past", "reason"),
    [
        ([], None),
        ([(20.0, 1)], "would take 90 s a run"),
        ([(10.0, 1), (20.0, 2)], None),
        ([(10.0, 1), (40.0, 2)], "would take 160 s a run"),
        ([(1.0, 2**30), (2.0, 4 * 2**30)], "would need 16.0 GiB, and 7.0 GiB may be used"),
    ],
)
def test_what_would_take_too_much_is_not_run(past, reason, monkeypatch):
    monkeypatch.setattr(turns, "free_bytes", lambda: 10 * 2**30)
    rows = [{"seconds": seconds, "peak_bytes": peak} for seconds, peak in past]
    assert turns._too_much(rows, turns.Limits(60, 1)) == reason


def test_a_contender_that_fails_is_left_out(monkeypatch):
    worker = turns.Worker("no such contender")
    with pytest.raises(EngineError, match="KeyError: 'no such contender'"):
        worker.ask(run=True)
    worker.close()


def test_a_turn_of_short_runs_begins_with_some_that_do_not_count(monkeypatch):
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.6)
    monkeypatch.setattr(turns, "WARM_SECONDS", 0.7)
    clock = iter((0.0, 0.5, 0.5, 0.9, 1.0, 1.1, 2.0, 2.2, 3.0, 3.4, 5.0, 9.0))
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock))
    assert turns.turn(lambda: None) == pytest.approx([0.1, 0.2, 0.4])
    assert turns.turn(lambda: None) == pytest.approx([4.0])


def wanted(*flags):
    return benchmark._wanted(benchmark.make_parser().parse(flags))


def test_implementations():
    assert wanted("--attention", "elsaa,performer,torch_sdpa") == {"elsaa", "performer", "torch_sdpa", "matmul"}
    both = wanted("--attention", "elsaa,performer,blocks", "--implementation", "xla,interpret")
    assert both == {"elsaa", "elsaa:interpret", "performer", "blocks", "matmul"}
    assert wanted("--attention", "race", "--implementation", "pallas") == {"race:pallas", "matmul"}


def test_what_cannot_run_is_left_out_with_a_reason(measured, monkeypatch, capsys):
    monkeypatch.setattr(contenders_module.importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    assert contenders()["torch_sdpa"].missing == "torch is not installed; see the README for the bench extra"
    assert contenders()["exact"].missing is None
    if jax.default_backend() != "gpu":
        assert contenders()["exact:pallas"].missing == "there is no GPU"
        run(measured[0], "--implementation", "xla,pallas")
        assert "exact:pallas is left out: there is no GPU" in capsys.readouterr().out


def test_the_report(measured):
    text = report.format_report(measured[1], ["forward"])
    for title in ("seconds, median (quartiles)", "peak memory", "temporary memory", "compilation", "share of the"):
        assert f"forward, {title}" in text
    exact = measured[1][0]
    assert f"{exact['seconds']:.3g} ({exact['low']:.3g} to {exact['high']:.3g})" in text


def timed(attention, length, causal, backward, seconds):
    return {"attention": attention, "length": length, "causal": causal, "backward": backward, "seconds": seconds}


def test_the_crossover_is_where_exact_wins_with_its_backward_and_without():
    rows = []
    for length, times in ((512, (1, 2, 1, 2)), (1024, (1, 2, 1, 2)), (2048, (1, 2, 3, 2)), (4096, (9, 2, 9, 2))):
        cases = (("exact", False), ("elsaa", False), ("exact", True), ("elsaa", True))
        rows += [timed(name, length, False, back, s) for (name, back), s in zip(cases, times, strict=True)]
    assert benchmark.measured_crossover(rows) == {"full": 1024}
    assert benchmark.measured_crossover([row for row in rows if not row["backward"]]) == {}
    assert benchmark.measured_crossover([row | {"causal": True} for row in rows if row["length"] == 4096]) == {
        "causal": 0
    }


def test_the_crossover_is_written_into_the_library(measured, tmp_path, monkeypatch):
    table = tmp_path / "crossover.json"
    table.write_text('{"cpu": {"causal": 7, "full": 9}, "tpu": {"full": 5}}')
    monkeypatch.setattr(benchmark.importlib.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(benchmark, "_check_crossover", lambda names, modes: None)
    monkeypatch.setattr(benchmark, "measured_crossover", lambda rows: {"full": 1024})
    run(measured[0], "--write-crossover")
    assert json.loads(table.read_text()) == {"cpu": {"causal": 7, "full": 1024}, "tpu": {"full": 5}}


@pytest.mark.parametrize("flags", [[], ["--attention", "exact,elsaa"], ["--modes", "forward,backward"]])
def test_a_crossover_that_could_not_be_known_is_refused_at_once(tmp_path, flags):
    with pytest.raises(EngineError, match="needs exact and elsaa, forward and backward"):
        run(tmp_path, "--write-crossover", *flags)
    assert not list(tmp_path.iterdir())
