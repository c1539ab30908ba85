"""ArXiv papers packed to N tokens of one class, and pairs of such packs. No paper is in two splits."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import sys
from collections.abc import Sequence

import numpy as np

from experiments.engine.data.raw import ARXIV_CLASSES
from experiments.engine.data.store import check_labels, open_split
from experiments.engine.data.text import CLASS, SEPARATOR, Words, as_text, tokenize
from experiments.engine.errors import EngineError

NUM_CLASSES = len(ARXIV_CLASSES)
SHORTEST = 1000  # number of tokens of the shortest paper that is kept
# Names of archives that are not English words are removed wherever they stand, however their hyphen is written. The
# others are removed only where they are part of an identifier, an address or a subject class, for example
# math/0105123, archive/cs, cs.LG, physics.optics or [math].
_ARCHIVES = (
    r"astro-ph|cond-mat|gr-qc|hep-ex|hep-lat|hep-ph|hep-th|math-ph|nlin|nucl-ex|nucl-th|quant-ph|q-bio|q-fin|"
    r"alg-geom|chao-dyn|patt-sol|solv-int|adap-org|comp-gas|dg-ga|funct-an|q-alg|cmp-lg|chem-ph|acc-phys|atom-ph|"
    r"plasm-ph|supr-con|mtrl-th|ao-sci|bayes-an"
).replace("-", r"(?:\s*[-_~\u2010-\u2015\u2212]+\s*)?")
_WORDS = r"math|physics|cs|stat|eess|econ"
_OF_PHYSICS = (
    r"acc-ph|ao-ph|app-ph|atm-clus|atom-ph|bio-ph|chem-ph|class-ph|comp-ph|data-an|ed-ph|flu-dyn|gen-ph|geo-ph|hist-ph|"
    r"ins-det|med-ph|optics|plasm-ph|pop-ph|soc-ph|space-ph"
)
TAGS = re.compile(
    rf"\barxiv\s*[:.]?\s*(?:[a-z.-]+/)?[0-9.v]*"
    rf"|(?<![a-z])(?:{_ARCHIVES})(?![a-z])(?:\.[a-z-]+)?(?:/[0-9v]+)?"
    rf"|(?<![a-z])(?:{_WORDS})(?:/[0-9]{{4,}}[0-9v]*|\.[a-z]{{2}}(?![a-z])(?:/[0-9v]+)?)"
    rf"|(?<![a-z])physics\.(?:{_OF_PHYSICS})(?![a-z])(?:/[0-9v]+)?"
    rf"|(?<![a-z])archive/(?:{_WORDS})(?![a-z])"
    rf"|\[\s*(?:{_WORDS})\s*\]",
    re.IGNORECASE,
)


def strip_tags(text: str) -> str:
    """Removes the names of archives from a text, because they would give away the class of a paper."""
    return TAGS.sub(" ", text)


@dataclasses.dataclass(frozen=True)
class Papers:
    """The papers of one split.

    Attributes:
      tokens: Tokens of each paper, (n,) int32.
      labels: Class of each paper, (papers,) int32.
      by_class: Indices of the papers of each class.
      duplicates: Number of papers of the published split that were left out because their text occurs elsewhere.
    """

    tokens: tuple[np.ndarray, ...]
    labels: np.ndarray
    by_class: tuple[np.ndarray, ...]
    duplicates: int


def text_hash(tokens: Sequence[str]) -> str:
    """Returns a hash of a text by its tokens."""
    return hashlib.sha256(" ".join(tokens).encode()).hexdigest()


@functools.cache
def load_papers(data_dir: str | None, vocabulary: int) -> dict[str, Papers]:
    """Returns the papers of at least 1,000 tokens by split. The vocabulary is made from the training papers.

    A text that occurs in several splits is kept in the test split, or else in the validation split.
    """
    words = Words()
    texts: dict[str, list[np.ndarray]] = {}
    labels: dict[str, list[int]] = {}
    duplicates: dict[str, int] = {}
    known: set[str] = set()
    for split in ("test", "valid", "train"):
        source = open_split("arxiv11", split, data_dir)
        texts[split], labels[split], duplicates[split] = [], [], 0
        for index in range(len(source)):
            example = source[index]
            tokens = tokenize(strip_tags(as_text(example["text"])))
            name = text_hash(tokens)
            if name in known:
                duplicates[split] += 1
            elif len(tokens) >= SHORTEST:
                texts[split].append(words.number(tokens))
                labels[split].append(int(example["label"]))
            known.add(name)
        if duplicates[split]:
            print(f"arxiv11: {duplicates[split]} duplicate papers are left out of the {split} split", file=sys.stderr)
        check_labels("arxiv11", np.array(labels[split], np.int64))
    for split in ("train", "test"):
        rare = min(range(NUM_CLASSES), key=labels[split].count)
        if labels[split].count(rare) < 2:
            raise EngineError(
                f"arxiv11 has {labels[split].count(rare)} papers of class {rare} with {SHORTEST:,} tokens in its "
                f"{split} split; each class needs two"
            )
    ids = words.vocabulary(texts["train"], vocabulary)
    return {
        split: make_papers([ids[text] for text in texts[split]], labels[split], duplicates[split]) for split in texts
    }


def make_papers(tokens: Sequence[np.ndarray], labels: Sequence[int], duplicates: int = 0) -> Papers:
    """Returns the papers of a split, grouped by class."""
    classes = np.array(labels, np.int32)
    by_class = tuple(np.flatnonzero(classes == label) for label in range(NUM_CLASSES))
    return Papers(tuple(tokens), classes, by_class, duplicates)


def fill(papers: Papers, order: np.ndarray, length: int) -> tuple[np.ndarray, list[int]]:
    """Joins papers in an order until there are `length` tokens.

    Returns:
      The tokens, (length,), and the indices of the papers. If there are too few papers, they are repeated.
    """
    parts: list[np.ndarray] = []
    used: list[int] = []
    missing = length
    while missing > 0:
        index = int(order[len(used) % len(order)])
        part = papers.tokens[index][:missing]
        parts.append(part)
        used.append(index)
        missing -= len(part)
    return np.concatenate(parts), used


def stream_packs(papers: Papers, indices: np.ndarray, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns training examples from an endless stream in which all classes are equally frequent.

    Args:
      papers: Papers of a split.
      indices: Positions of the examples in the stream, (n,).
      length: Number of tokens of an example, N.
      seed: Random seed of the stream.

    Returns:
      Tokens (n, N) int32 and labels (n,) int32.
    """
    rows, labels = [], []
    for index in indices.tolist():
        rng = np.random.default_rng([seed, index])
        label = _balanced_class(index, seed)
        rows.append(fill(papers, rng.permutation(papers.by_class[label]), length)[0])
        labels.append(label)
    return np.stack(rows), np.array(labels, np.int32)


def _balanced_class(index: int, seed: int) -> int:
    """Returns the class of an example of the stream. Every group of 11 consecutive examples has each class once."""
    turn, place = divmod(index, NUM_CLASSES)
    return int(np.random.default_rng([seed, turn, 1]).permutation(NUM_CLASSES)[place])


def pack_once(papers: Papers, length: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Returns test examples: the papers of each class are joined, and each is used at most once.

    Papers that do not fill the last example of a class are dropped.

    Returns:
      Tokens (n, N), labels (n,), and the indices of the papers of each example.
    """
    rows, labels, sources = [], [], []
    for label, members in enumerate(papers.by_class):
        waiting: list[int] = []
        for index in members.tolist():
            waiting.append(index)
            if sum(len(papers.tokens[i]) for i in waiting) >= length:
                rows.append(np.concatenate([papers.tokens[i] for i in waiting])[:length])
                labels.append(label)
                sources.append(waiting)
                waiting = []
    if not rows:
        raise ValueError(f"no class has papers of {length} tokens in all; use a smaller length")
    return np.stack(rows), np.array(labels, np.int32), sources


def _half(members: np.ndarray, side: int) -> np.ndarray:
    """Returns the first half (side 0) or the second half (side 1) of some papers."""
    half = len(members) // 2
    return members[half:] if side else members[:half]


def make_pairs(
    papers: Papers, indices: np.ndarray, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray, list[tuple[list[int], list[int]]]]:
    """Returns pairs `[CLS] a [SEP] b` of N tokens. About half of them have a and b of one class.

    Args:
      papers: Papers of a split, with two or more of each class.
      indices: Positions of the pairs in their stream, (n,).
      length: Number of tokens of a pair, N.
      seed: Random seed of the stream.

    Returns:
      Tokens (n, N), labels (n,), which are 1 where a and b are of one class, and the indices of the papers of a and of
      b. No paper is in both.
    """
    first, second = (length - 2 + 1) // 2, (length - 2) // 2
    rows, labels, sources = [], [], []
    for index in indices.tolist():
        rng = np.random.default_rng([seed, index, 2])
        same = int(rng.integers(2))
        one = int(rng.integers(NUM_CLASSES))
        other = one if same else (one + 1 + int(rng.integers(NUM_CLASSES - 1))) % NUM_CLASSES
        # In both kinds of pairs each side draws from half of its class, so repeated papers do not give away the label.
        members, others = (np.random.default_rng([seed, index, 3, label]) for label in (one, other))
        a, papers_a = fill(papers, _half(members.permutation(papers.by_class[one]), 0), first)
        b, papers_b = fill(papers, _half(others.permutation(papers.by_class[other]), 1), second)
        rows.append(np.concatenate([[CLASS], a, [SEPARATOR], b]).astype(np.int32))
        labels.append(same)
        sources.append((papers_a, papers_b))
    return np.stack(rows), np.array(labels, np.int32), sources
