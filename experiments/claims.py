"""The paper's claims, and what our results say of each: it holds, it does not, or the intervals do not decide."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.engine.results import Rows
from experiments.engine.stats import difference_interval, wilson_interval

HOLDS, FAILS, UNDECIDED, MISSING = "holds", "does not hold", "not decided", "no results yet"
VISION = ("oxford_pets", "flowers102", "food101")
LONG = ("arxiv_full_32k", *VISION)
SHORT = ("imdb", "fashion_mnist")
CAUSAL = ("arxiv_causal_32k", "arxiv_causal_64k", "tiny_imagenet")
CLOSE = 0.02  # what the paper calls within 1 to 2 points
PAPER_RETRIEVAL_LENGTH = 64_000


@dataclasses.dataclass(frozen=True)
class Summary:
    """The test accuracy of one attention on one task, the mean over seeds.

    Attributes:
      accuracy: the mean.
      n: test examples of one seed: all seeds have the same.
      seeds: number of them.
    """

    accuracy: float
    n: int
    seeds: int

    @property
    def interval(self) -> tuple[float, float]:
        """Of the mean, as if it were that of one seed."""
        return wilson_interval(round(self.accuracy * self.n), self.n)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What our results say of a claim."""

    claim: str
    verdict: str
    evidence: str


def summarize(rows: Rows) -> dict[tuple[str, str], Summary]:
    """By task and attention."""
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["task"], row["attention"]), []).append(row)
    return {
        key: Summary(
            statistics.fmean(row["test_accuracy"] for row in group), min(row["n_test"] for row in group), len(group)
        )
        for key, group in groups.items()
    }


def judge(rows: Rows, niah: Rows) -> list[Verdict]:
    """A verdict on each claim, from rows of the classifiers and of needle in a haystack."""
    found = summarize(rows)
    lengths = {row["task"]: row["length"] for row in rows}
    return [
        _greater(
            "The multiplier helps: ELSAA beats the ablation m = 1 on long inputs", found, LONG, "elsaa", "sort_lsh_race"
        ),
        _greater("Vision is peaked: ELSAA beats RACE on images", found, VISION, "elsaa", "race"),
        _greater("Text is diffuse: RACE beats ELSAA on ArXiv", found, LONG[:1], "race", "elsaa"),
        _exact_fails(found, lengths),
        _short(found),
        _needle(niah),
        _greater("Causal ELSAA beats causal exact attention", found, CAUSAL, "elsaa", "exact"),
        _greater("Causal ELSAA beats causal RACE", found, CAUSAL, "elsaa", "race"),
    ]


def _greater(
    claim: str, found: dict[tuple[str, str], Summary], tasks: Sequence[str], better: str, worse: str
) -> Verdict:
    """Of the mean difference over tasks."""
    both = [task for task in tasks if (task, better) in found and (task, worse) in found]
    pairs = [(task, found[task, better], found[task, worse]) for task in both]
    if len(pairs) < len(tasks):
        return Verdict(claim, MISSING, f"{len(pairs)} of {len(tasks)} tasks have both {better} and {worse}")
    differences = [difference_interval(a.accuracy, a.n, b.accuracy, b.n) for _, a, b in pairs]
    mean = statistics.fmean(a.accuracy - b.accuracy for _, a, b in pairs)
    # Independent errors of the tasks: their squares add up.
    down = sum((a.accuracy - b.accuracy - low) ** 2 for (_, a, b), (low, _) in zip(pairs, differences, strict=True))
    up = sum((high - a.accuracy + b.accuracy) ** 2 for (_, a, b), (_, high) in zip(pairs, differences, strict=True))
    low, high = mean - down**0.5 / len(pairs), mean + up**0.5 / len(pairs)
    verdict = HOLDS if low > 0 else FAILS if high < 0 else UNDECIDED
    each = ", ".join(f"{task} {100 * (a.accuracy - b.accuracy):+.1f}" for task, a, b in pairs)
    return Verdict(
        claim, verdict, f"{100 * mean:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}) in the mean; {each}"
    )


def _exact_fails(found: dict[tuple[str, str], Summary], lengths: dict[str, int]) -> Verdict:
    claim = "Exact attention does not learn retrieval at 64,000 tokens, ELSAA does"
    if ("retrieval", "exact") not in found or ("retrieval", "elsaa") not in found:
        return Verdict(claim, MISSING, "retrieval needs elsaa and exact")
    exact, elsaa = found["retrieval", "exact"], found["retrieval", "elsaa"]
    evidence = (
        f"at {lengths['retrieval']:,} tokens exact {100 * exact.accuracy:.1f} %, elsaa {100 * elsaa.accuracy:.1f} %"
    )
    if lengths["retrieval"] < PAPER_RETRIEVAL_LENGTH:
        return Verdict(claim, UNDECIDED, f"{evidence}; 64,000 tokens were not tried")
    fails, learns = exact.interval[0] <= 0.5, elsaa.interval[0] > 0.5
    return Verdict(claim, HOLDS if fails and learns else FAILS, evidence)


def _short(found: dict[tuple[str, str], Summary]) -> Verdict:
    claim = "On short inputs ELSAA, RACE and exact attention are within 2 points"
    names = ("elsaa", "race", "exact")
    if not all((task, name) in found for task in SHORT for name in names):
        return Verdict(claim, MISSING, f"{' and '.join(SHORT)} need {', '.join(names)}")
    evidence, verdicts = [], []
    for task in SHORT:
        best = max(names, key=lambda name: found[task, name].accuracy)
        worst = min(names, key=lambda name: found[task, name].accuracy)
        a, b = found[task, best], found[task, worst]
        low, high = difference_interval(a.accuracy, a.n, b.accuracy, b.n)
        verdicts.append(HOLDS if high <= CLOSE else FAILS if low > CLOSE else UNDECIDED)
        evidence.append(f"{task}: {best} {100 * (a.accuracy - b.accuracy):.1f} points above {worst}")
    verdict = FAILS if FAILS in verdicts else UNDECIDED if UNDECIDED in verdicts else HOLDS
    return Verdict(claim, verdict, "; ".join(evidence))


def _needle(niah: Rows) -> Verdict:
    claim = "ELSAA finds the needle beyond the training length, RACE does not"
    found = needle_rows(niah)
    common = [length for name, length in found if name == "elsaa" and ("race", length) in found]
    if not common:
        return Verdict(claim, MISSING, "needle in a haystack needs elsaa and race at one length")
    elsaa, race = (found[name, max(common)] for name in ("elsaa", "race"))
    evidence = "; ".join(
        f"{row['attention']} {100 * row['accuracy']:.1f} % of {row['n']} at {row['length']:,}" for row in (elsaa, race)
    )
    if max(common) <= elsaa["train_length"]:
        return Verdict(claim, UNDECIDED, f"{evidence}; it was not longer than in training")
    return Verdict(claim, HOLDS if elsaa["low"] > race["high"] else FAILS, evidence)


def needle_rows(niah: Rows) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of needle in a haystack by attention and length, with the needle anywhere and alone."""
    return {
        (row["attention"], row["length"]): row
        for row in niah
        if row["n"] and row["depth"] is None and not row["distractors"]
    }
