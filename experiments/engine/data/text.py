"""Tokens of English text, a vocabulary of the training texts, and augmentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

UNKNOWN, CLASS, SEPARATOR = range(3)
NUM_SPECIAL = 3
_BREAK = re.compile(r"<br\s*/?>")
# Punctuation becomes tokens. Quotes, colons and semicolons are removed.
_SPACED = str.maketrans({c: f" {c} " for c in ".,()!?'"} | {'"': "", ";": " ", ":": " "})


def as_text(value: str | bytes) -> str:
    """Returns a text of a prepared set as str."""
    return value.decode() if isinstance(value, bytes) else value


def tokenize(text: str) -> list[str]:
    """Splits a text into lower-case tokens: words, and each of . , ( ) ! ? and the apostrophe."""
    return _BREAK.sub(" ", text.lower()).translate(_SPACED).split()


class Words:
    """A numbering of tokens in the order of their first use, so that texts are kept as integers until ids are known."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, tokens: Sequence[str]) -> np.ndarray:
        """Returns the numbers of some tokens, (n,) int32. New tokens get new numbers."""
        numbers = self._numbers
        return np.fromiter((numbers.setdefault(token, len(numbers)) for token in tokens), np.int32, len(tokens))

    def vocabulary(self, texts: Iterable[np.ndarray], size: int) -> np.ndarray:
        """Returns the id of every number: the most frequent tokens of some texts get ids, the others are UNKNOWN.

        Args:
          texts: Texts as numbers of tokens.
          size: Number of ids, including UNKNOWN, CLASS and SEPARATOR. Equally frequent tokens are taken in alphabetical
            order.

        Returns:
          An array (numbers,) int32. `ids[text]` has the ids of a text that is given in numbers.
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
    """Augments texts by light EDA (easy data augmentation).

    Each row is augmented in one of two ways, with equal probability: its tokens are deleted with probability `rate`, or
    `rate * N` pairs of tokens are swapped. A row that has lost tokens is filled up with its own beginning.

    Args:
      tokens: Token ids, (B, N).
      rng: Random generator.
      rate: Probability of deletion, and number of swaps per token.
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
