"""Reviews of IMDB as examples of exactly N tokens: they are kept, cut into pieces, or joined."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from experiments.engine.data.store import check_labels, open_split
from experiments.engine.data.text import Words, as_text, tokenize

NUM_CLASSES = 2


@dataclasses.dataclass(frozen=True)
class Reviews:
    """The examples of one split.

    Attributes:
      tokens: Tokens of each example, (n, N) int32.
      labels: Labels of the examples, (n,) int32.
      sources: Indices in the split of the reviews that each example is made of.
    """

    tokens: np.ndarray
    labels: np.ndarray
    sources: tuple[tuple[int, ...], ...]


def cut(documents: list[np.ndarray], labels: np.ndarray, length: int) -> Reviews:
    """Makes examples of N tokens from reviews.

    A review of N to 2N tokens gives its first N. A longer one is cut into overlapping pieces that begin N/2 tokens
    apart. Shorter ones are joined with others of their class until there are N tokens; reviews of a class that are left
    at the end are dropped.

    Args:
      documents: Tokens of each review, (tokens,) int32.
      labels: Labels of the reviews, (reviews,).
      length: Number of tokens of an example, N.
    """
    rows: list[np.ndarray] = []
    classes: list[int] = []
    sources: list[tuple[int, ...]] = []
    joined: dict[int, list[int]] = {}

    def add(tokens: np.ndarray, label: int, reviews: tuple[int, ...]) -> None:
        rows.append(tokens[:length])
        classes.append(label)
        sources.append(reviews)

    for index, (tokens, label) in enumerate(zip(documents, labels.tolist(), strict=True)):
        if len(tokens) > 2 * length:
            for start in range(0, len(tokens) - length + 1, max(1, length // 2)):
                add(tokens[start : start + length], label, (index,))
        elif len(tokens) >= length:
            add(tokens, label, (index,))
        else:
            waiting = joined.setdefault(label, [])
            waiting.append(index)
            if sum(len(documents[i]) for i in waiting) >= length:
                add(np.concatenate([documents[i] for i in waiting]), label, tuple(waiting))
                waiting.clear()
    if not rows:
        raise ValueError(f"no review and no join of reviews has {length} tokens; use a smaller length")
    return Reviews(np.stack(rows), np.array(classes, np.int32), tuple(sources))


@functools.cache
def load_reviews(data_dir: str | None, length: int, vocabulary: int) -> tuple[Reviews, Reviews]:
    """Returns the training and the test examples. The vocabulary is made from the training reviews."""
    words = Words()
    texts, labels = {}, {}
    for split in ("train", "test"):
        source = open_split("imdb", split, data_dir)
        examples = [source[index] for index in range(len(source))]
        texts[split] = [words.number(tokenize(as_text(example["text"]))) for example in examples]
        labels[split] = np.array([example["label"] for example in examples], np.int64)
        check_labels("imdb", labels[split])
    ids = words.vocabulary(texts["train"], vocabulary)
    train, test = (cut([ids[text] for text in texts[split]], labels[split], length) for split in ("train", "test"))
    return train, test
