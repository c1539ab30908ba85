"""Tokens, reviews and papers: nothing crosses a split, no class tag is left, and all has the length it should."""

import collections
import dataclasses
import hashlib
import re

import numpy as np
import pytest

from experiments.engine.data import papers, raw, reviews, sums
from experiments.engine.data.catalog import find
from experiments.engine.data.examples import PairData, PaperData, ReviewData
from experiments.engine.data.order import shuffled
from experiments.engine.data.text import CLASS, NUM_SPECIAL, SEPARATOR, UNKNOWN, Words, augment, tokenize
from tests.experiments.engine.data.raw_sets import needs_real_data, paper_text, real, write_arxiv, write_imdb


def test_basic_english_tokens():
    text = "It's \"good\":<br />very (very) good; isn't it? YES, it is."
    assert tokenize(text) == (
        "it ' s good very ( very ) good isn ' t it ? yes , it is .".split()  # noqa: SIM905
    )


def test_the_vocabulary_keeps_what_is_frequent():
    words = Words()
    other = words.number(["d", "d", "d", "c"])
    ids = words.vocabulary([words.number(tokens) for tokens in (["b", "a", "a"], ["c", "a", "b"])], NUM_SPECIAL + 2)
    np.testing.assert_array_equal(ids[words.number(["a", "b", "c", "d"])], [3, 4, UNKNOWN, UNKNOWN])
    np.testing.assert_array_equal(ids[other], UNKNOWN)
    assert ids[words.number([])].shape == (0,)
    # Of one count, by the alphabet.
    ids = words.vocabulary([words.number(["c", "b"])], NUM_SPECIAL + 9)
    np.testing.assert_array_equal(ids[words.number(["b", "c", "a"])], [3, 4, UNKNOWN])


def test_augmentation_deletes_or_swaps():
    tokens = np.tile(np.arange(10, 210, dtype=np.int32), (200, 1))
    out = augment(tokens, np.random.default_rng(0))
    assert out.shape == tokens.shape
    deleted = 0
    for row in out:
        if len(set(row)) < 200:
            deleted += 1
            kept = np.argmin(np.diff(row)) + 1  # and then the row begins anew
            assert kept > 150
            assert (np.diff(row[:kept]) > 0).all()
            np.testing.assert_array_equal(row[kept:], row[: 200 - kept])
        else:
            np.testing.assert_array_equal(np.sort(row), tokens[0])
            assert 0 < (row != tokens[0]).sum() <= 20
    assert 60 < deleted < 140
    np.testing.assert_array_equal(tokens[0], np.arange(10, 210))


def test_reviews_are_kept_cut_or_joined():
    documents = [np.arange(n, dtype=np.int32) + 1000 * i for i, n in enumerate((10, 20, 21, 4, 30, 5, 9, 3))]
    labels = np.array([0, 1, 1, 0, 1, 0, 0, 1])
    cut = reviews.cut(documents, labels, 10)
    assert cut.sources == ((0,), (1,), (2,), (2,), (2,), (4,), (4,), (4,), (4,), (4,), (3, 5, 6))
    np.testing.assert_array_equal(cut.labels, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(cut.tokens[3], 2000 + np.arange(5, 15))
    np.testing.assert_array_equal(cut.tokens[-1], [3000, 3001, 3002, 3003, 5000, 5001, 5002, 5003, 5004, 6000])
    with pytest.raises(ValueError, match="no review and no join of reviews has 500 tokens; use a smaller length"):
        reviews.cut(documents, labels, 500)


def words_of(split, label, count):
    """Words that no other split has."""
    rng = np.random.default_rng([len(split), label, count])
    return " ".join(f"{split}{label}w{i}" for i in rng.integers(20, size=count))


@pytest.fixture(scope="module")
def words_tell_their_split(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("splits")
    kinds = ("neg", "pos")
    write_imdb(
        data_dir,
        {
            (split, kind): [words_of(split, kinds.index(kind), 40 + 30 * index) for index in range(6)]
            for split in ("train", "test")
            for kind in kinds
        },
    )
    write_arxiv(
        data_dir,
        {
            split: [(label, words_of(split, label, 1000 + index)) for label in range(11) for index in range(3)]
            for split in ("train", "valid", "test")
        },
    )
    return str(data_dir)


@pytest.mark.parametrize(
    "data",
    [ReviewData(64, 1000), PaperData(1500, 1000), PairData(1500, 1000, train_pairs=50, test_pairs=50)],
    ids=["reviews", "papers", "pairs"],
)
def test_no_test_text_is_trained_on(words_tell_their_split, data):
    """The vocabulary is that of training, so words of other splits are unknown: none in training, all in the test."""
    data = dataclasses.replace(data, data_dir=words_tell_their_split)
    trained, _ = data.training(0, 100, 0, np.random.default_rng(0))
    assert (trained != UNKNOWN).all()
    read, _ = data.read("train", np.arange(min(10, data.count("train"))))
    assert (read != UNKNOWN).all()
    tested, _ = data.read("test", np.arange(min(10, data.count("test"))))
    assert np.isin(tested, [UNKNOWN, CLASS, SEPARATOR]).all()
    assert (tested == UNKNOWN).sum() >= tested.size - 2 * len(tested)


def test_training_reviews_are_augmented(words_tell_their_split):
    data = ReviewData(64, 1000, data_dir=words_tell_their_split)
    plain = dataclasses.replace(data, augmentation_rate=0.0)
    count = data.count("train")
    (augmented, labels), (kept, same) = (some.training(0, count, 5, np.random.default_rng(0)) for some in (data, plain))
    np.testing.assert_array_equal(labels, same)
    assert (augmented != kept).any(axis=1).mean() > 0.9
    originals = {row.tobytes() for row in data.read("train", np.arange(count))[0]}
    assert {row.tobytes() for row in kept} == originals


TAGGED = {
    "hepph/9402300, hepth@xxx/9207091": ", @xxx/9207091",
    "hep-\nth/9901001 and CondMat1": "and 1",
    "xxx.lanl.gov/archive/cs or physics.optics/0105123": "xxx.lanl.gov/ or",
    "[physics.gen-ph] physics.flu-dyn": "[ ]",
    "physics. Optics follows": "physics. Optics follows",
    "an archive/csv of math": "an archive/csv of math",
    "see hep-th/9901001v2 and [astro-ph.CO]": "see and [ ]",
    "arXiv:0704.0001 [math.AG] 5 Apr": "[ ] 5 Apr",
    "arXiv: cond-mat/0203517v1": "",
    "cs.LG/0101001, CS.LG": ",",
    "math/0412345 [math] quant-ph": "",
    "the physics of math, cs and mathematics": "the physics of math, cs and mathematics",
    "alpha-hep-photon": "alpha-hep-photon",
    "see_hep_ph0502231, hep\u2013th/9901001 and cond--mat": "see_ 0502231, and",
}


@pytest.mark.parametrize(("text", "stripped"), TAGGED.items())
def test_class_tags_go_and_words_stay(text, stripped):
    assert papers.strip_tags(text).split() == stripped.split()


@pytest.fixture(scope="module")
def few_papers(tmp_path_factory):
    """Three papers of each class in training, two elsewhere.

    In training there is a test paper too, one that is too short by a word, and one that names its archive.
    """
    data_dir = tmp_path_factory.mktemp("arxiv")
    splits = {"train": (3, 100), "valid": (2, 200), "test": (2, 300)}
    texts = {
        split: [(label, paper_text(start + index, label)) for label in range(11) for index in range(count)]
        for split, (count, start) in splits.items()
    }
    long = f"hep-th/9901001 {paper_text(400, 0)}"
    texts["train"] += [texts["test"][0], (0, paper_text(500, 0, words=999)), (0, long)]
    write_arxiv(data_dir, texts)
    return papers.load_papers(str(data_dir), 2000)


def test_no_paper_is_in_two_splits(few_papers):
    assert {split: data.duplicates for split, data in few_papers.items()} == {"test": 0, "valid": 0, "train": 1}
    assert [len(data.tokens) for data in few_papers.values()] == [22, 22, 34]
    assert {len(tokens) for data in few_papers.values() for tokens in data.tokens} == {1100}
    hashes = [hashlib.sha256(tokens.tobytes()).hexdigest() for data in few_papers.values() for tokens in data.tokens]
    assert len(set(hashes)) == len(hashes)


def test_packs_are_of_one_class_and_balanced(few_papers):
    train = few_papers["train"]
    tokens, labels = papers.stream_packs(train, np.arange(22), 2500, seed=1)
    assert tokens.shape == (22, 2500)
    assert collections.Counter(labels.tolist()) == dict.fromkeys(range(11), 2)
    for row, label in zip(tokens, labels, strict=True):
        members = {tuple(train.tokens[index][:200]) for index in train.by_class[label]}
        assert tuple(row[:200]) in members
        assert tuple(row[1100:1300]) in members
    again, _ = papers.stream_packs(train, np.arange(5, 7), 2500, seed=1)
    np.testing.assert_array_equal(again, tokens[5:7])
    packed, classes, sources = papers.pack_once(few_papers["test"], 2000)
    assert packed.shape == (11, 2000)
    np.testing.assert_array_equal(classes, np.arange(11))
    used = [index for of in sources for index in of]
    assert len(used) == len(set(used)) == 22


def test_pairs_have_no_paper_in_common(few_papers):
    data = few_papers["test"]
    tokens, labels, sources = papers.make_pairs(data, np.arange(200), 513, seed=0)
    assert tokens.shape == (200, 513)
    assert (tokens[:, 0] == CLASS).all()
    assert (tokens[:, 257] == SEPARATOR).all()
    assert 70 < labels.sum() < 130
    for label, (a, b) in zip(labels, sources, strict=True):
        assert not set(a) & set(b)
        assert label == (data.labels[a[0]] == data.labels[b[0]])
    # Long ones come to the end of half a class and begin anew: as often in both kinds.
    _, _, sources = papers.make_pairs(data, np.arange(200), 5000, seed=0)
    assert {len(set(side)) for pair in sources for side in pair} == {1}


def test_the_order_is_a_function_of_the_position():
    whole = shuffled(10, 0, 30, seed=3)
    for epoch in whole.reshape(3, 10):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(10))
    assert (whole[:10] != whole[10:20]).any()
    np.testing.assert_array_equal(shuffled(10, 7, 9, seed=3), whole[7:16])
    assert (shuffled(10, 0, 10, seed=4) != whole[:10]).any()


@needs_real_data
def test_published_reviews():
    """Labels and splits as published; what the published set has twice is known: docs/paper.md names the numbers."""
    data_set, folder = find("imdb"), real("imdb")
    hashes = {}
    for split in data_set.splits:
        examples = [example for _, example in raw.examples(data_set, data_set.forms[0], folder, split)]
        assert collections.Counter(example["label"] for example in examples) == {0: 12_500, 1: 12_500}
        hashes[split] = {hashlib.sha256(example["text"].encode()).hexdigest() for example in examples}
    assert len(hashes["train"] & hashes["test"]) == PUBLISHED_TWICE


@needs_real_data
def test_published_papers():
    """Splits as published; no tag of a class is left, and no paper is in two splits."""
    data_set, folder = find("arxiv11"), real("arxiv11")
    left = re.compile(
        r"(?<![a-z])(astro|hep|cond|gr|quant|nucl)[\s_~\u2010-\u2015\u2212-]*(ph|th|ex|lat|mat|qc)(?![a-z])|(?<![a-z])nlin(?![a-z])"
        r"|arxiv *:|archive/(cs|math|physics)\b|(?<![a-z])(cs|math|physics)/\d{7}",
        re.I,
    )
    sums.check(data_set, data_set.forms[0], folder)
    hashes: list[str] = []
    ids: list[str] = []
    for split, count in (("train", 3132), ("valid", 384), ("test", 389)):
        before = len(ids)
        for _, example in raw.examples(data_set, data_set.forms[0], folder, split):
            text = papers.strip_tags(example["text"])
            assert not left.search(text), (example["id"], left.search(text))
            hashes.append(papers.text_hash(tokenize(text)))
            ids.append(example["id"])
        assert len(ids) - before == count
    assert len(set(ids)) == len(ids)
    assert len(set(hashes)) == len(hashes)


@needs_real_data
def test_published_articles():
    data_set, folder = find("wikitext2"), real("wikitext2")
    for split, low, high in (("train", 2.0e6, 2.1e6), ("valid", 2.1e5, 2.2e5), ("test", 2.4e5, 2.5e5)):
        ((_, example),) = raw.examples(data_set, data_set.forms[0], folder, split)
        assert low < len(example["text"].split()) < high


PUBLISHED_TWICE = 123  # reviews that the published training and test sets both have
