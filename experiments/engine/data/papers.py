"""ArXiv papers packed to N tokens of one class, and pairs of such packs; no paper is in two splits."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import sys
from collections.abc import Sequence

import numpy as np

from experiments.engine.data.raw import ARXIV_CLASSES
from experiments.engine.data.store import open_split
from experiments.engine.data.text import CLASS, SEPARATOR, Words, as_text, tokenize
from experiments.engine.errors import EngineError

NUM_CLASSES = len(ARXIV_CLASSES)
SHORTEST = 1000  # tokens of a paper that is kept
# Names of archives that are no English words go wherever they stand, and however their hyphen is written; the others
# where they are part of an identifier, of an address or of a subject class, such as math/0105123, archive/cs, cs.LG,
# physics.optics or [math].
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
    """A text without the names of archives, by which a paper would tell its own class."""
    return TAGS.sub(" ", text)


@dataclasses.dataclass(frozen=True)
class Papers:
    """The papers of one split.

    Attributes:
      tokens: of each paper, (n,) int32.
      labels: its class.
      by_class: the papers of each class, by index.
      duplicates: papers of the published split that were left out, because their text is there already.
    """

    tokens: tuple[np.ndarray, ...]
    labels: np.ndarray
    by_class: tuple[np.ndarray, ...]
    duplicates: int


def text_hash(tokens: Sequence[str]) -> str:
    """A name of a text by its tokens."""
    return hashlib.sha256(" ".join(tokens).encode()).hexdigest()


@functools.cache
def load_papers(data_dir: str | None, vocabulary: int) -> dict[str, Papers]:
    """The papers of at least 1,000 tokens of all splits; the vocabulary is that of the training papers.

    A text that occurs twice is kept where it matters most, in the test split, then in the validation split.
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
            print(f"arxiv11: {duplicates[split]} papers of {split} are there already, and left out", file=sys.stderr)
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
    """The papers of a split, by class."""
    classes = np.array(labels, np.int32)
    by_class = tuple(np.flatnonzero(classes == label) for label in range(NUM_CLASSES))
    return Papers(tuple(tokens), classes, by_class, duplicates)


def fill(papers: Papers, order: np.ndarray, length: int) -> tuple[np.ndarray, list[int]]:
    """Papers in an order, end to end, cut at `length` tokens; and which ones. A class that is too small starts anew."""
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
    """Training examples: a stream without end, in which each class is as frequent as any other.

    Args:
      papers: of a split.
      indices: of the examples in the stream.
      length: N.
      seed: of the stream.

    Returns:
      tokens (n, N) int32 and labels (n,) int32.
    """
    rows, labels = [], []
    for index in indices.tolist():
        rng = np.random.default_rng([seed, index])
        label = _balanced_class(index, seed)
        rows.append(fill(papers, rng.permutation(papers.by_class[label]), length)[0])
        labels.append(label)
    return np.stack(rows), np.array(labels, np.int32)


def _balanced_class(index: int, seed: int) -> int:
    """Each run of 11 examples has every class once."""
    turn, place = divmod(index, NUM_CLASSES)
    return int(np.random.default_rng([seed, turn, 1]).permutation(NUM_CLASSES)[place])


def pack_once(papers: Papers, length: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Test examples: the papers of each class end to end, each used once; what does not fill a last pack is dropped.

    Returns:
      tokens (n, N), labels (n,), and the papers of each.
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
    """The first or the second half."""
    half = len(members) // 2
    return members[half:] if side else members[:half]


def make_pairs(
    papers: Papers, indices: np.ndarray, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray, list[tuple[list[int], list[int]]]]:
    """Pairs `[CLS] a [SEP] b` of N tokens, half of them of one class.

    Args:
      papers: of a split, with two or more of each class.
      indices: of the pairs in their stream.
      length: N.
      seed: of the stream.

    Returns:
      tokens (n, N), labels (n,), 1 where a and b are of one class, and the papers of a and b: none is in both.
    """
    first, second = (length - 2 + 1) // 2, (length - 2) // 2
    rows, labels, sources = [], [], []
    for index in indices.tolist():
        rng = np.random.default_rng([seed, index, 2])
        same = int(rng.integers(2))
        one = int(rng.integers(NUM_CLASSES))
        other = one if same else (one + 1 + int(rng.integers(NUM_CLASSES - 1))) % NUM_CLASSES
        # Each side has half of its class, in both kinds of pairs: which papers come again tells nothing.
        members, others = (np.random.default_rng([seed, index, 3, label]) for label in (one, other))
        a, of_a = fill(papers, _half(members.permutation(papers.by_class[one]), 0), first)
        b, of_b = fill(papers, _half(others.permutation(papers.by_class[other]), 1), second)
        rows.append(np.concatenate([[CLASS], a, [SEPARATOR], b]).astype(np.int32))
        labels.append(same)
        sources.append((of_a, of_b))
    return np.stack(rows), np.array(labels, np.int32), sources
