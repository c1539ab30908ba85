"""Text: basic English tokens, a vocabulary of the training texts, and augmentation."""

from __future__ import annotations

import collections
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


class Vocabulary:
    """The most frequent tokens of some texts; the others are UNKNOWN.

    Attributes:
      size: number of ids, UNKNOWN, CLASS and SEPARATOR among them.
    """

    def __init__(self, texts: Iterable[Sequence[str]], size: int) -> None:
        """Counts the tokens of the texts; those of one count are in the order of the alphabet."""
        counts: collections.Counter[str] = collections.Counter()
        for tokens in texts:
            counts.update(tokens)
        kept = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: size - NUM_SPECIAL]
        self._ids = {token: NUM_SPECIAL + index for index, (token, _) in enumerate(kept)}
        self.size = size

    def encode(self, tokens: Sequence[str]) -> np.ndarray:
        """(n,) int32."""
        return np.fromiter((self._ids.get(token, UNKNOWN) for token in tokens), np.int32, len(tokens))


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
