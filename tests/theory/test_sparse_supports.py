"""Supports as SciPy sparse matrices: equal to the dense definition, and fast at 65,536 tokens."""

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from scipy import sparse

from elsaa_jax import reference, theory
from elsaa_jax.theory import matchings
from tests.theory.graphs import brute_matching

FORMATS = (sparse.csr_array, sparse.csc_array, sparse.coo_array, sparse.csr_matrix)


def tokens(seed, num_queries, num_keys, bits=4, head_dim=6):
    rng = np.random.default_rng(seed)
    shapes = (num_queries, head_dim), (num_keys, head_dim), (bits, head_dim)
    return [rng.normal(size=shape) for shape in shapes]


# Powers of two, at which the place in a bucket has no rounding.
SIZES = [(64, 64), (64, 37), (32, 64), (16, 128), (1, 128)]


@pytest.mark.parametrize(("num_queries", "num_keys"), SIZES)
@pytest.mark.parametrize("pairing", [None, "rank", "bucket"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sorted_search_gives_the_definition(num_queries, num_keys, pairing, is_causal):
    if is_causal and num_queries > num_keys:
        num_queries = num_keys
    options = {"pairing": pairing, "is_causal": is_causal}
    for seed, block_size, neighbors in itertools.product(range(2), (1, 5, 16), (0, 1)):
        arrays = tokens(seed, num_queries, num_keys)
        for min_length in (0, 4, 16, 200):
            sizes = {"block_size": block_size, "num_neighbors": neighbors, "min_length": min_length}
            if is_causal and (min_length or block_size) == 5:
                continue
            found = theory.sort_lsh_support(*arrays, sparse=True, **sizes, **options)
            expected = theory.sort_lsh_support(*arrays, **sizes, **options)
            assert found.dtype == bool
            np.testing.assert_array_equal(found.toarray(), expected, err_msg=str(sizes))


def keys_of_a_bucket(rank, key_ranks, turn, num_turns, block_size):
    """The keys that a query reads, key by key: the block of its place among the sorted keys."""
    keys = sorted(range(len(key_ranks)), key=lambda j: key_ranks[j])
    low, high = sum(x < rank for x in key_ranks), sum(x <= rank for x in key_ranks)
    block = min(low + (high - low) * (2 * turn + 1) // (2 * num_turns), len(keys) - 1) // block_size
    return keys[block * block_size : (block + 1) * block_size]


@pytest.mark.parametrize(("n", "base", "block_size"), [(75, 7, 3), (100, 11, 16), (61, 1, 2)])
def test_buckets_at_odd_lengths(n, base, block_size):
    """The rule in integers, for halves that are no powers of two."""
    query, key, planes = tokens(7, n, n, bits=3)
    ranks = [list(reference.gray_rank(reference.hard_codes(x, planes), 3)) for x in (query, key)]
    full, causal = np.zeros((2, n, n), bool)
    for i in range(n):
        full[i, keys_of_a_bucket(ranks[0][i], ranks[1], i, n, block_size)] = True
        causal[i, i // base * base : i + 1] = True
        half = base
        while half < n:
            if i // half % 2:
                start = i // (2 * half) * 2 * half
                past = keys_of_a_bucket(ranks[0][i], ranks[1][start : start + half], i % half, half, block_size)
                causal[i, start + np.array(past)] = True
            half *= 2
    options = {"block_size": block_size, "pairing": "bucket", "sparse": True}
    np.testing.assert_array_equal(theory.sort_lsh_support(query, key, planes, **options).toarray(), full)
    found = theory.sort_lsh_support(query, key, planes, min_length=base, is_causal=True, **options)
    np.testing.assert_array_equal(found.toarray(), causal)


@pytest.mark.parametrize(("half", "bucket"), [(3, 5), (1000, 1000), (65_536, 65_535)])
def test_places_in_a_bucket_are_exact(half, bucket):
    """floor((hi - lo) (2 i + 1) / (2 m)) in integers, for the first, middle and last query of a half."""
    from elsaa_jax.theory.sorted_supports import _place_in_bucket

    turns = np.unique([0, 1, half // 2, half - 1])
    found = _place_in_bucket(np.full(len(turns), 7), np.full(len(turns), 7 + bucket), turns, half, 10**9)
    assert list(found) == [7 + bucket * (2 * int(i) + 1) // (2 * half) for i in turns]


@pytest.mark.parametrize("to_sparse", FORMATS)
def test_sparse_supports_give_what_dense_ones_give(to_sparse):
    rng = np.random.default_rng(0)
    for _ in range(30):
        support = rng.random((int(rng.integers(1, 9)), int(rng.integers(1, 9)))) < 0.3
        stored = to_sparse(support)
        assert theory.matching_size(stored) == theory.matching_size(support)
        assert theory.deficiency(stored) == theory.deficiency(support)
        for normalized in (False, True):
            expected = theory.generic_rank(support, 2, normalized_sum=normalized)
            assert theory.generic_rank(stored, 2, normalized_sum=normalized) == expected
        matrices = [theory.generic_matrix(np.random.default_rng(1), x, 2) for x in (support, stored)]
        np.testing.assert_array_equal(*matrices)
        query, key = rng.normal(size=(support.shape[0], 3)), rng.normal(size=(support.shape[1], 3))
        np.testing.assert_array_equal(*(theory.softmax_operator(query, key, x).matrix for x in (support, stored)))


@pytest.mark.parametrize("smallest", [0, 10**9], ids=["merged", "not merged"])
def test_matchings_with_and_without_merging_equal_rows(monkeypatch, smallest):
    """Random graphs against all injections, and block graphs, which have equal rows and columns."""
    monkeypatch.setattr(matchings, "MERGED_EDGES", smallest)
    rng = np.random.default_rng(5)
    for trial in range(200):
        support = rng.random((5, 5)) < 0.25
        if trial % 2:
            support = support[np.ix_(*rng.integers(0, 5, (2, 5)))]
        assert theory.matching_size(support) == brute_matching(support)
    blocks = np.kron(np.array([[1, 1, 0], [0, 1, 0], [0, 1, 0]], bool), np.ones((4, 3), bool))
    assert theory.matching_size(blocks) == 6
    assert theory.matching_size(np.zeros((4, 7), bool)) == 0


def test_the_matching_of_neighbouring_blocks_takes_no_exponential_time():
    """SciPy's bipartite matching does not end within minutes for this support, as it never marks dead ends."""
    n = 4096
    support = theory.sort_lsh_support(*tokens(6, n, n, bits=8, head_dim=64), sparse=True, **NEIGHBOURS)
    start = time.monotonic()
    assert 0.9 * n < theory.matching_size(support) < n
    assert time.monotonic() - start < 5


NEIGHBOURS = {"block_size": 16, "num_neighbors": 1, "pairing": "bucket"}


def test_a_stored_false_is_no_edge():
    stored = sparse.csr_array((np.array([True, False]), ([0, 1], [0, 1])), shape=(2, 2))
    assert theory.matching_size(stored) == 1
    assert stored.nnz == 2  # The argument is left as it was.


def test_sparse_supports_must_be_boolean():
    with pytest.raises(ValueError, match=r"support has shape \(3, 3\) and dtype float64; it must be a boolean matrix"):
        theory.matching_size(sparse.eye_array(3))


def test_safety_of_a_sparse_support():
    rng = np.random.default_rng(2)
    support = sparse.eye_array(200, dtype=bool).tocsr()
    counts = []
    for _ in range(100):
        union = theory.with_safety(rng, support, 0.05)
        assert union.dtype == bool
        assert union.diagonal().all()
        counts.append(union.nnz)
    expected, error = 200 + 0.05 * (200**2 - 200), np.sqrt(200**2 * 0.05 * 0.95 / 100)
    assert abs(np.mean(counts) - expected) < 5 * error
    # Rows and columns are equally likely.
    edges = sum(theory.with_safety(rng, support, 0.05).astype(int).toarray() for _ in range(50))
    for axis in (0, 1):
        means = (edges.sum(axis) - 50) / (50 * 199)
        assert np.abs(means - 0.05).max() < 5 * np.sqrt(0.05 * 0.95 / (50 * 199))
    assert theory.with_safety(rng, support, 0.0).nnz == 200
    assert theory.with_safety(rng, support, 3.0).nnz == 200**2
    for _ in range(20):  # Gaps between edges as large as an integer can be.
        assert theory.with_safety(rng, support, 1e-18).nnz == 200


def test_long_supports_have_the_edges_of_the_formula():
    """Blocks that divide every half are full: base and levels are known in advance."""
    n, block, base = 8192, 32, 128
    support = theory.sort_lsh_support(*tokens(3, n, n), sparse=True, block_size=block, min_length=base, is_causal=True)
    levels = int(np.log2(n // base))
    assert support.nnz == n * (base + 1) // 2 + levels * (n // 2) * block
    assert theory.deficiency(support) == 0
    assert sparse.triu(support, 1).nnz == 0
    rank = theory.sort_lsh_support(*tokens(3, n, n), sparse=True, block_size=block)
    assert rank.nnz == n * block
    assert theory.deficiency(rank) == 0
    bucket = theory.sort_lsh_support(*tokens(3, n, n), sparse=True, block_size=block, pairing="bucket")
    assert bucket.nnz == n * block
    assert 0 < theory.deficiency(bucket) < n


def test_gray_ranks_are_those_of_the_reference():
    from elsaa_jax.theory.sorted_supports import _gray_ranks

    query, _, planes = tokens(4, 500, 1, bits=7, head_dim=9)
    expected = reference.gray_rank(reference.hard_codes(query, planes), 7)
    np.testing.assert_array_equal(_gray_ranks(query, planes), expected)


MATCHING_65536 = """
import pathlib, re, time
import numpy as np
from elsaa_jax import theory
rng = np.random.default_rng(0)
query, key, planes = rng.normal(size=(65_536, 32)), rng.normal(size=(65_536, 32)), rng.normal(size=(8, 32))
start = time.monotonic()
support = theory.sort_lsh_support(query, key, planes, sparse=True, block_size=64, min_length=256, is_causal=True)
size = theory.matching_size(support)
seconds = time.monotonic() - start
# The peak of this process: `ru_maxrss` would be that of the process that started it, if that is larger.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())
print(support.nnz, size, seconds, int(peak[1]) / 2**20)
"""


def test_the_matching_of_a_causal_support_of_65536_tokens():
    command = [sys.executable, "-c", MATCHING_65536]
    run = subprocess.run(command, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True, check=True)
    edges, size, seconds, gib = (float(x) for x in run.stdout.split())
    print(f"\n65,536 tokens, causal, {edges:,.0f} edges: {seconds:.1f} s, peak {gib:.2f} GiB of the process")
    assert edges == 65_536 * 257 // 2 + 8 * 32_768 * 64
    assert size == 65_536
    assert seconds < 60
    assert gib < 2
