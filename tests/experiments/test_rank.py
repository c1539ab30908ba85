"""The rank experiment in small: its parts, its files, its numbers, its errors."""

import importlib.util
import json
import math
import pathlib

import numpy as np
import pytest

from experiments.engine.stats import mean_interval
from experiments.rank import branch_error, costs, interactions, matchings, spectra
from experiments.rank import command as rank
from tests.experiments.engine.helpers import assert_refused


def run(tmp_path, *flags):
    return rank.run(rank.make_parser().parse(["--workdir", str(tmp_path), *flags]))


def test_tables_pictures_and_results(tmp_path, capsys):
    flags = ("--parts", "certificate,proposition,ranks,success", "--length", "4096", "--supports", "60")
    results = run(tmp_path, *flags, "--trials", "40", "--seeds", "2", "--max-length", "64")
    text = capsys.readouterr().out
    for title in ("## Certificates", "## Random supports that obey", "## Matching size", "## Deficiency at most r"):
        assert title in text
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["flags"]["length"] == 4096
    assert json.loads(json.dumps(results)) == stored["parts"]
    for picture in ("ranks.png", "success.png") if importlib.util.find_spec("matplotlib") else ():
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")

    assert [row["n"] for row in results["certificate"]] == [64, 256, 1024, 4096]
    last = results["certificate"][-1]
    assert last["r"] == 61
    assert last["certified"] == (last["density"] >= last["threshold"])
    (counts,) = results["proposition"]
    assert counts["structural"] == counts["completion"] == counts["proposition"] == 60
    low_rank = {row["n"]: row["low_rank"] for row in results["ranks"] if not (row["is_causal"] or row["vocabulary"])}
    assert low_rank == {32: 32, 64: 61}
    assert not any(row["violated"] for row in results["success"] if row["model"] != "hashed")


def test_hashed_edges_are_not_independent():
    """With the same probability for each pair, the theorem's bound fails where all pairs share their planes."""
    rows = matchings.success_of_hashes(0, 100, ((64, 2),))
    one_table = {row["model"]: row for row in rows if row["num_tables"] == 1 and row["r"] == 0}
    assert not one_table["independent"]["violated"]
    assert one_table["hashed"]["violated"]
    assert one_table["hashed"]["success"] < 0.5 < one_table["hashed"]["bound"]


def test_hashed_edges_have_the_probabilities_of_the_model():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 5, 8))
    means = {
        model: np.mean([matchings.sample_support(rng, model, query, key, 2, 3) for _ in range(3000)], axis=0)
        for model in ("independent", "hashed")
    }
    assert np.abs(means["independent"] - means["hashed"]).max() < 5 * math.sqrt(2 * 0.25 / 3000)


def test_materialize():
    matrix = np.random.default_rng(0).normal(size=(7, 10)).astype(np.float32)
    found = spectra.materialize(
        lambda query, key, value: {"twice": 2 * np.einsum("ts,bsnh->btnh", matrix, value)},
        np.zeros((7, 4), np.float32),
        np.zeros((10, 4), np.float32),
    )
    np.testing.assert_allclose(found["twice"], 2 * matrix, rtol=1e-6)


def test_bias_and_variance():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(200, 8))
    exact /= np.sqrt(np.mean(exact**2))
    errors = [branch_error.error_of(exact + 0.5 + 0.3 * rng.normal(size=(6, 200, 8)), exact) for _ in range(20)]
    assert np.mean([e.bias for e in errors]) == pytest.approx(0.25, rel=0.02)
    assert np.mean([e.variance for e in errors]) == pytest.approx(0.09, rel=0.02)
    for e in errors:
        assert e.error == pytest.approx(e.bias + e.variance)
    unbiased = [branch_error.error_of(exact + rng.normal(size=(2, 200, 8)), exact).bias for _ in range(50)]
    assert abs(np.mean(unbiased)) < 0.02


def test_fitted_gates():
    first, second = np.random.default_rng(0).normal(size=(2, 3, 20, 4))
    exact = np.zeros((20, 4))
    np.testing.assert_allclose(branch_error.fitted_gates(first, second, exact), 0.0, atol=1e-12)
    shared = np.broadcast_to(first[:1], first.shape)
    np.testing.assert_allclose(branch_error.fitted_gates(shared, second, 0.7 * first[0]), 0.7 * shared, atol=1e-12)


def test_errors_over_entropy():
    setting = branch_error.Setting(length=128, head_dim=16, block_size=16, draws=4, similarity=0.98)
    rows = list(branch_error.error_rows(setting, (0.1, 6.0), range(3)))
    cells = {(row["temperature"], row["method"]): row for row in rows}
    assert len(cells) == len(rows) == 2 * 10
    flat, sharp = (cells[t, "sparse"] for t in (0.1, 6.0))
    assert flat["entropy"] == pytest.approx(math.log(128), abs=0.05)
    assert sharp["entropy"] < 1
    # Diffuse attention is the low-rank branch's, sharp attention to a key that the hash finds the sparse one's.
    assert cells[0.1, "low_rank"]["high"] < flat["low"]
    assert sharp["high"] < cells[6.0, "low_rank"]["low"]
    for row in rows:
        assert row["low"] <= row["error"] <= row["high"]
        assert row["error"] == pytest.approx(row["bias"] + row["variance"])
    for temperature in (0.1, 6.0):
        cell = {method: row["error"] for (t, method), row in cells.items() if t == temperature}
        assert cell["convex"] == pytest.approx(cell["lse"], rel=1e-3)
        assert cell["lse, best lambda"] <= cell["lse"] + 1e-9
        assert cell["sum, fitted gates"] <= min(cell["sum"], cell["sparse"], cell["low_rank"])


def test_the_example_counted_from_the_code(monkeypatch):
    monkeypatch.setattr(interactions, "LENGTH", 4096 + 256)
    monkeypatch.setattr(interactions, "CAUSAL_BASES", (1024,))
    rows = {row["method"]: row for row in interactions.count_interactions(0)}
    assert rows["sparse"]["counted"] == rows["sparse"]["paper"] == 4352 * 256
    for method in ("exact", "sparse", "low rank", "elsaa"):
        # Hashing and padding come on top; twice the formula would be something else.
        assert rows[method]["paper"] <= rows[method]["traced"] < 1.8 * rows[method]["paper"]
    assert rows["sparse, causal, N0 = 1,024, rank"]["counted"] > 2 * rows["sparse"]["counted"]


def test_costs_by_formula_and_by_count(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(costs, "LENGTH", 2048)
    monkeypatch.setattr(costs, "POSITIONS", (1000,))
    rows = {row["cost"]: row for row in run(tmp_path, "--parts", "costs")["costs"]}
    assert "## Parameters, hashing, sorting and memory" in capsys.readouterr().out
    for name, row in rows.items():
        if name.startswith(("parameters", "multiply-adds", "sorted", "keys read")):
            assert row["counted"] == row["formula"]
        elif name.startswith("kept"):
            assert 0.5 * row["formula"] < row["counted"] <= row["formula"]
    assert rows["parameters of gate, lambda and beta, scalar lambda"]["note"] == "6.3% of the projections"
    assert rows["sorted tokens, causal"]["counted"] == 2 * 2048


def test_mean_interval():
    # t of 3 degrees of freedom at 97.5 % is 3.1824.
    mean, low, high = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 3.182446 * math.sqrt(5 / 3) / 2
    assert (mean, low, high) == pytest.approx((2.5, 2.5 - half, 2.5 + half), rel=1e-5)
    with pytest.raises(ValueError, match="there are 1 values; an interval needs at least 2"):
        mean_interval([1.0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parts", "rank"], "'rank' is not known; use all, or some of certificate,"),
        (["--length", "1"], "argument --length: '1' is not an integer >= 2"),
        (["--delta", "1"], "argument --delta: '1' is not a number above 0 and below 1"),
        (["--exponent", "nan"], "argument --exponent: 'nan' is not a number above 0"),
        (["--seeds", "1"], "argument --seeds: '1' is not an integer >= 2"),
        (["--steps", "3"], "unrecognized arguments: --steps 3"),
    ],
)
def test_bad_flags(flags, message, capsys):
    assert_refused(rank.make_parser(), flags, message, capsys)


def test_a_low_rank_branch_of_full_rank_is_certified(tmp_path, capsys):
    """With r >= n the sum of the theorem is empty, and its logarithm, minus infinity, is null in JSON."""
    results = run(tmp_path, "--parts", "certificate", "--length", "65", "--rank", "64")
    assert [(row["n"], row["confidence"] == 1.0) for row in results["certificate"]] == [(64, True), (65, False)]
    assert results["certificate"][0]["log_delta"] is None
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["certificate"][0]["certified"]
    assert "log Delta" in capsys.readouterr().out


def test_defaults():
    arguments = rank.make_parser().parse([])
    assert arguments.parts == tuple(rank.PARTS)
    assert arguments.workdir == pathlib.Path("runs/rank")
