"""Brute force over all 65,536 graphs of four rows, and ranks in exact arithmetic modulo a prime."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from elsaa_jax import theory
from elsaa_jax.config import FUSION_KINDS
from tests.theory.graphs import subsets

N = 4
PRIME = 2**31 - 1


@pytest.fixture(scope="module")
def graphs():
    """All boolean matrices of four rows and columns."""
    return (np.arange(2 ** (N * N))[:, None] >> np.arange(N * N) & 1).astype(bool).reshape(-1, N, N)


@pytest.fixture(scope="module")
def matchings(graphs):
    """Their matching sizes, over all permutations."""
    orders = itertools.permutations(range(N))
    return np.max([graphs[:, np.arange(N), order].sum(1) for order in orders], axis=0)


def exact_ranks(matrices):
    """Ranks of integer matrices (..., n, n) over the field of PRIME elements, by elimination."""
    matrices = matrices.reshape(-1, *matrices.shape[-2:]) % PRIME
    every, ranks = np.arange(len(matrices)), np.zeros(len(matrices), int)
    for column in range(matrices.shape[2]):
        # The first row at or below the current rank with a nonzero entry becomes the pivot.
        usable = (matrices[:, :, column] != 0) & (np.arange(matrices.shape[1]) >= ranks[:, None])
        found, pivot = usable.any(1), usable.argmax(1)
        which, row = every[found], ranks[found]
        matrices[which, row], matrices[which, pivot[found]] = matrices[which, pivot[found]], matrices[which, row]
        pivots = matrices[which, row]
        pivots = pivots * inverses(pivots[:, column])[:, None] % PRIME
        factors = matrices[which, :, column] * (np.arange(matrices.shape[1]) > row[:, None])
        matrices[which] = (matrices[which] - factors[:, :, None] * pivots[:, None, :] % PRIME) % PRIME
        ranks[found] += 1
    return ranks


def inverses(values):
    """values^(PRIME - 2), by squaring."""
    result, power, exponent = np.ones_like(values), values, PRIME - 2
    while exponent:
        if exponent & 1:
            result = result * power % PRIME
        power, exponent = power * power % PRIME, exponent >> 1
    return result


def rational_rank(matrix):
    """The rank of one integer matrix in rational arithmetic."""
    rows, rank = [[Fraction(int(x)) for x in row] for row in matrix], 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            factor = rows[i][column] / rows[rank][column]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


def test_exact_ranks_are_those_of_rational_arithmetic():
    rng = np.random.default_rng(0)
    matrices = rng.integers(-1, 2, (300, 5, 5))
    assert set(exact_ranks(matrices)) >= {3, 4, 5}
    np.testing.assert_array_equal(exact_ranks(matrices), [rational_rank(x) for x in matrices])


def test_matching_size_of_all_graphs(graphs, matchings):
    """A graph with its rows in ascending order stands for all orders of its rows: 3,876 of 65,536."""
    rows = graphs @ (1 << np.arange(N))
    chosen = np.flatnonzero((np.diff(rows, axis=1) >= 0).all(1))
    assert len(chosen) == 3876
    assert [theory.matching_size(graphs[i]) for i in chosen] == list(matchings[chosen])


def test_hall_on_all_graphs(graphs, matchings):
    """The deficiency is the largest |I| - |N(I)| over all sets of rows."""
    violations = [len(rows) - graphs[:, list(rows)].any(1).sum(1) for rows in subsets(N)]
    np.testing.assert_array_equal(np.max(violations, axis=0), N - matchings)


@pytest.mark.parametrize("r", range(N + 1))
def test_the_proposition_on_all_graphs_exactly(graphs, matchings, r):
    """rank(S + BA) = min(n, nu + r) over a finite field; a random matrix misses its rank with probability 4 / 2^31."""
    rng = np.random.default_rng([1, r])

    def draw(*shape):
        return rng.integers(1, PRIME, (len(graphs), *shape))

    low_rank = np.zeros((len(graphs), N, N), int)
    left, right = draw(N, r), draw(r, N)
    for k in range(r):
        low_rank = (low_rank + left[:, :, k, None] * right[:, None, k] % PRIME) % PRIME
    np.testing.assert_array_equal(exact_ranks(graphs * draw(N, N) + low_rank), np.minimum(N, matchings + r))


def test_the_theorem_on_all_graphs(graphs, matchings):
    """P[nu < n - r] for independent edges, summed over all graphs, is at most Delta_r."""
    rng = np.random.default_rng(2)
    informative = 0
    for _ in range(20):
        q = rng.random((N, N)) ** rng.choice([0.01, 0.1, 1.0])
        probability = np.where(graphs, q, 1 - q).prod((1, 2))
        assert probability.sum() == pytest.approx(1)
        for r in range(N + 1):
            delta = theory.delta_exact(q, r)
            assert probability[matchings < N - r].sum() <= delta * (1 + 1e-12)
            informative += 0 < delta < 1
    assert informative > 20


def operators(support, planes, seed, ensembles=1):
    """Both branches of random tokens; with ensembles, the average of their RACE operators."""
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(2, len(support), planes.shape[-1]))
    sparse = theory.softmax_operator(query, key, support)
    parts = [theory.race_operator(query, key, part) for part in np.split(planes, ensembles)]
    matrix = np.mean([part.matrix for part in parts], axis=0)
    return sparse, theory.Operator(matrix, np.log(np.mean([np.exp(part.log_mass) for part in parts], axis=0)))


def test_a_sum_of_branches_shares_the_vector_of_ones():
    """The exception of the proposition: n = 5, one key for all queries, one plane."""
    support = np.zeros((5, 5), bool)
    support[:, 0] = True
    sparse, low_rank = operators(support, np.eye(3)[None, :1], seed=3)
    assert theory.race_rank(1, 1) == 2
    ranks = {
        kind: theory.numerical_rank(theory.fused_operator(sparse, low_rank, kind=kind), 1e-10) for kind in FUSION_KINDS
    }
    assert ranks == {"sum": 2, "elsaa": 3, "convex": 3, "lse": 3}
    assert theory.generic_rank(support, 2, normalized_sum=True) == 2
    assert theory.generic_rank(support, 2) == 3


def test_ranks_of_sums_of_branches():
    """Whether or not every row has a key, and for any constant gates; the floor eps changes nothing."""
    rng = np.random.default_rng(4)
    with_every_key = without = 0
    for trial in range(200):
        n = int(rng.integers(4, 11))
        support = rng.random((n, n)) < 0.3
        if trial % 2:  # Few columns, and a key for every row.
            support[:, n // 2 :] = False
            support[:, 0] |= ~support.any(1)
        planes = rng.normal(size=(1, int(rng.integers(1, 3)), 4))
        sparse, low_rank = operators(support, planes, seed=[5, trial])
        gates = dict(zip(("gate_sparse", "gate_low_rank"), rng.uniform(0.5, 1.0, 2), strict=True))
        r = theory.numerical_rank(low_rank.matrix, 1e-11)
        if theory.numerical_rank(sparse.matrix, 1e-11) < theory.matching_size(support):
            continue
        fused = theory.fused_operator(sparse, low_rank, kind="sum", **gates)
        expected = theory.generic_rank(support, r, normalized_sum=True)
        assert theory.numerical_rank(fused, 1e-11) == expected
        reduced = expected < theory.generic_rank(support, r)
        with_every_key, without = with_every_key + reduced, without + (not support.any(1).all())
    assert with_every_key > 30
    assert without > 30


@pytest.mark.parametrize(("ensembles", "tables", "bits"), [(2, 1, 2), (3, 2, 2), (2, 2, 3)])
def test_rank_of_ensembles(ensembles, tables, bits):
    """Ensembles are normalised one by one, and still share the vector of ones."""
    planes = np.random.default_rng(6).normal(size=(ensembles * tables, bits, 8))
    _, low_rank = operators(np.ones((80, 80), bool), planes, 7, ensembles)
    expected = theory.race_rank(ensembles * tables, bits)
    assert expected < 80
    assert theory.numerical_rank(low_rank.matrix) == expected


def test_independent_probabilities_are_possible_in_n_plus_1_dimensions():
    """Orthonormal keys and one more dimension realise any cosines whose rows are shorter than 1."""
    n = 6
    cosine = np.random.default_rng(8).uniform(-1, 1, (n, n)) / np.sqrt(n)
    query = np.concatenate([cosine, np.sqrt(1 - (cosine**2).sum(1, keepdims=True))], axis=1)
    key = np.eye(n, n + 1)
    np.testing.assert_allclose(theory.angular_similarity(query, key), 1 - np.arccos(cosine) / np.pi, atol=1e-12)


def test_edge_probability_is_concave_with_one_bit_and_convex_with_one_table():
    rho = np.linspace(0, 1, 101)
    bends = {
        (bits, tables): np.diff(theory.edge_probability(rho, bits, tables), 2)
        for bits, tables in itertools.product((1, 2, 5), (1, 4))
    }
    assert (bends[1, 4] < 1e-12).all()
    assert (bends[2, 1] > -1e-12).all()
    assert (bends[5, 1] > -1e-12).all()
    assert bends[5, 4].min() < -1e-4 < 1e-4 < bends[5, 4].max()
