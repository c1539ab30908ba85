"""IMDB as long reviews of exactly N tokens: kept, cut into windows, or joined."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from experiments.engine.data.store import open_split
from experiments.engine.data.text import Words, as_text, tokenize

NUM_CLASSES = 2


@dataclasses.dataclass(frozen=True)
class Reviews:
    """Examples of one split.

    Attributes:
      tokens: (n, N) int32.
      labels: (n,) int32.
      sources: the reviews of each example, by index in the split.
    """

    tokens: np.ndarray
    labels: np.ndarray
    sources: tuple[tuple[int, ...], ...]


def cut(documents: list[np.ndarray], labels: np.ndarray, length: int) -> Reviews:
    """Reviews of N to 2N tokens are kept (their first N), longer ones become windows with stride N/2, shorter ones are
    joined with others of their class until there are N. What is left of a class at its end is dropped.
    """
    rows: list[np.ndarray] = []
    classes: list[int] = []
    sources: list[tuple[int, ...]] = []
    joined: dict[int, list[int]] = {}

    def add(tokens: np.ndarray, label: int, of: tuple[int, ...]) -> None:
        rows.append(tokens[:length])
        classes.append(label)
        sources.append(of)

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
    """The training and the test examples; the vocabulary is that of the training reviews."""
    words = Words()
    texts, labels = {}, {}
    for split in ("train", "test"):
        source = open_split("imdb", split, data_dir)
        examples = [source[index] for index in range(len(source))]
        texts[split] = [words.number(tokenize(as_text(example["text"]))) for example in examples]
        labels[split] = np.array([example["label"] for example in examples], np.int32)
    ids = words.vocabulary(texts["train"], vocabulary)
    train, test = (cut([ids[text] for text in texts[split]], labels[split], length) for split in ("train", "test"))
    return train, test
