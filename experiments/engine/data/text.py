"""Text: basic English tokens, a vocabulary of the training texts, and augmentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

UNKNOWN, CLASS, SEPARATOR = range(3)
NUM_SPECIAL = 3
_BREAK = re.compile(r"<br\s*/?>")
# Punctuation becomes tokens; quotes, colons and semicolons go.
_SPACED = str.maketrans({c: f" {c} " for c in ".,()!?'"} | {'"': "", ";": " ", ":": " "})


def as_text(value: str | bytes) -> str:
    """A text of a prepared set."""
    return value.decode() if isinstance(value, bytes) else value


def tokenize(text: str) -> list[str]:
    """Basic English tokens, in lower case: words, and each of . , ( ) ! ? and the apostrophe."""
    return _BREAK.sub(" ", text.lower()).translate(_SPACED).split()


class Words:
    """Numbers of tokens in the order in which they are met: texts are kept as integers while a vocabulary is made."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, tokens: Sequence[str]) -> np.ndarray:
        """(n,) int32."""
        numbers = self._numbers
        return np.fromiter((numbers.setdefault(token, len(numbers)) for token in tokens), np.int32, len(tokens))

    def vocabulary(self, texts: Iterable[np.ndarray], size: int) -> np.ndarray:
        """The ids of all numbers: those of the most frequent tokens of some texts; the others are UNKNOWN.

        Args:
          texts: in numbers.
          size: number of ids, UNKNOWN, CLASS and SEPARATOR among them; tokens of one count are in alphabetical order.

        Returns:
          (numbers,) int32, by which `ids[text]` are the ids of a text.
        """
        counts = np.zeros(len(self._numbers), np.int64)
        for text in texts:
            found, times = np.unique(text, return_counts=True)
            counts[found] += times
        tokens = list(self._numbers)
        kept = sorted(np.flatnonzero(counts).tolist(), key=lambda number: (-counts[number], tokens[number]))
        kept = kept[: size - NUM_SPECIAL]
        ids = np.full(len(tokens), UNKNOWN, np.int32)
        ids[kept] = NUM_SPECIAL + np.arange(len(kept))
        return ids


def augment(tokens: np.ndarray, rng: np.random.Generator, *, rate: float = 0.05) -> np.ndarray:
    """Light EDA: of each row, tokens are deleted with probability `rate`, or as large a share of pairs is swapped.

    Args:
      tokens: (B, N); a row that has lost some goes on with its own beginning.
      rng: of the choice, half and half.
      rate: of deletion and of swaps.
    """
    batch, length = tokens.shape
    out = tokens.copy()
    deletes = np.less(rng.random(batch), 0.5)
    keep = rng.random((batch, length)) >= rate
    swaps = max(1, round(rate * length))
    pairs = rng.integers(length, size=(batch, swaps, 2))
    for row in range(batch):
        if deletes[row]:
            out[row] = np.resize(tokens[row, keep[row]], length)
        else:
            for first, second in pairs[row]:
                out[row, [first, second]] = out[row, [second, first]]
    return out
