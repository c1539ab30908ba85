"""Examples of needle in a haystack: the label is right, the place is uniform, and nothing but the context tells it."""

import numpy as np
import pytest

from experiments.niah import haystack
from experiments.niah.haystack import make_examples


@pytest.mark.parametrize(("length", "needles", "queries"), [(64, 8, 8), (64, 8, 3), (65, 5, 1), (512, 1, 1)])
def test_the_label_follows_its_key(length, needles, queries):
    examples = make_examples(np.random.default_rng(0), 50, length, needles=needles, queries=queries)
    assert examples.tokens.shape == (50, length)
    assert examples.answers.shape == (50, queries)
    context = length - 2 * queries
    for tokens, answers, depth in zip(*examples, strict=True):
        assert np.all(tokens[context::2] == haystack.SEPARATOR)
        is_key = (tokens >= haystack.FIRST_KEY) & (tokens < haystack.FIRST_VALUE)
        assert is_key[:context].sum() == needles
        for key, answer in zip(tokens[context + 1 :: 2], answers, strict=True):
            (place,) = np.flatnonzero(tokens[:context] == key)
            assert tokens[place + 1] == answer >= haystack.FIRST_VALUE
            assert answer < haystack.SEPARATOR
            assert 0.05 * context <= place
            assert place + 1 < 0.95 * context
        assert depth == place / context
        rest = np.delete(tokens[:context], np.concatenate([np.flatnonzero(is_key[:context]) + i for i in (0, 1)]))
        assert rest.max() < haystack.NUM_FILLER


@pytest.mark.parametrize("needles", [1, 5])
def test_the_place_is_uniform(needles):
    depths = make_examples(np.random.default_rng(0), 20_000, 258, needles=needles).depths
    places = np.round(depths * 256).astype(int)
    counts = np.bincount(places - places.min())
    expected = len(places) / len(counts)
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert abs(chi_square - len(counts)) < 5 * np.sqrt(2 * len(counts))
    assert places.min() == 13  # 5 % and 95 % of 256
    assert places.max() == 241


def test_without_the_context_there_is_only_chance():
    # The best guess from the question alone, learned from as many examples as it is tried on.
    rng = np.random.default_rng(0)
    tables = []
    for _ in range(2):
        examples = make_examples(rng, 20_000, 66, needles=4)
        table = np.zeros((haystack.VOCABULARY, haystack.VOCABULARY))
        np.add.at(table, (examples.tokens[:, -1], examples.answers[:, 0]), 1)
        tables.append(table)
    right = tables[1][np.arange(haystack.VOCABULARY), tables[0].argmax(1)].sum() / 20_000
    chance = 1 / haystack.NUM_VALUES
    assert abs(right - chance) < 5 * np.sqrt(chance / 20_000)


def test_depths_can_be_fixed():
    for depth in (0.05, 0.5, 0.95):
        examples = make_examples(np.random.default_rng(0), 20, 1024, needles=5, depth=depth)
        assert np.all(np.abs(examples.depths - depth) < 0.01)
        assert np.ptp(examples.depths) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 12, "needles": 8}, "length is 12; it is too short for 8 needles and 1 queries"),
        ({"length": 64, "needles": 2, "queries": 3}, "queries is 3 and needles is 2; it must be"),
        ({"length": 64, "depth": 0.99}, "depth is 0.99; it must lie from 0.05 to 0.95"),
    ],
)
def test_what_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_examples(np.random.default_rng(0), 1, **arguments)
