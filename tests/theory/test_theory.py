"""The rank theory: collisions, matchings, ranks, and the attention of the library as a matrix."""

import itertools
import math

import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import theory
from experiments.engine.stats import wilson_interval
from experiments.rank.matchings import random_support
from experiments.rank.spectra import FORMS, Form, draw_tokens, operator_row, theory_operators
from tests.theory.graphs import brute_matching, subsets


def binomial_error(frequency, probability, trials):
    """How many standard errors a frequency lies from its probability."""
    return abs(frequency - probability) / math.sqrt(max(probability * (1 - probability), 1 / trials) / trials)


def test_angular_similarity():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(5, 3)), rng.normal(size=(7, 3))
    rho = theory.angular_similarity(query, 5 * key)
    for i, j in itertools.product(range(5), range(7)):
        cross = np.linalg.norm(np.cross(query[i], key[j]))
        assert rho[i, j] == pytest.approx(1 - math.atan2(cross, query[i] @ key[j]) / math.pi)
    axes = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    np.testing.assert_allclose(theory.angular_similarity(axes, axes[:1])[:, 0], [1.0, 0.5, 0.0])
    np.testing.assert_array_equal(np.diag(theory.angular_similarity(query[:, :1], query[:, :1])), np.ones(5))


def test_probabilities_are_those_of_the_hash():
    # Of the library's own codes: 40,000 tables of 3 bits, as heads of one call, in groups of L = 4.
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(2, 4, 8)).astype(np.float32)
    planes = rng.normal(size=(40_000, 3, 8)).astype(np.float32)
    codes = [np.asarray(elsaa_jax.hard_codes(np.repeat(x[:, None], 40_000, axis=1), planes)) for x in (query, key)]
    rho = theory.angular_similarity(query, key)
    once, any_of_four = theory.collision_probability(rho, 3), theory.edge_probability(rho, 3, 4)
    for i, j in np.ndindex(4, 4):
        collide = codes[0][i] == codes[1][j]
        assert binomial_error(collide.mean(), once[i, j], 40_000) < 4
        assert binomial_error(collide.reshape(-1, 4).any(1).mean(), any_of_four[i, j], 10_000) < 4
    np.testing.assert_allclose(any_of_four, 1 - (1 - rho**3) ** 4)
    np.testing.assert_array_equal(theory.edge_probability(np.array([0.0, 1.0]), 5, 2), [0.0, 1.0])


@pytest.mark.parametrize(("bits", "tables", "head_dim"), [(1, 4, 2), (4, 4, 16), (12, 1, 64)])
def test_isotropic_density_and_mean(bits, tables, head_dim):
    assert theory.isotropic_density(bits, tables) == pytest.approx(1 - (1 - 2.0**-bits) ** tables)
    vectors = np.random.default_rng(2).normal(size=(2, 700, head_dim))
    # Rows of the sample are exchangeable; their means tell its error.
    rows = theory.edge_probability(theory.angular_similarity(*vectors), bits, tables).mean(1)
    error = rows.std(ddof=1) / math.sqrt(len(rows)) * math.sqrt(2)
    assert abs(rows.mean() - theory.isotropic_mean(bits, tables, head_dim)) < 5 * error


def test_q_iso_is_no_lower_bound_of_the_mean():
    # In the plane rho is uniform: the mean of 1 - (1 - rho)^4 is 1 - 1/5.
    assert theory.isotropic_mean(1, 4, 2) == pytest.approx(0.8)
    assert theory.isotropic_density(1, 4) == pytest.approx(0.9375)


def test_matching_and_hall():
    rng = np.random.default_rng(3)
    planted = 0
    for trial in range(300):
        n = 1 + trial % 6
        support, least = random_support(rng, n)
        matching = theory.matching_size(support)
        assert matching == brute_matching(support)
        hall = max(len(rows) - np.count_nonzero(support[list(rows)].any(0)) for rows in subsets(n))
        assert theory.deficiency(support) == n - matching == hall >= least
        planted += least > 0
    assert planted > 150


def test_rank_of_thousands_of_supports():
    """The lemmas of structural rank and completion, and the proposition; most supports have no perfect matching."""
    rng = np.random.default_rng(4)
    deficient = planted = 0
    for _ in range(3000):
        n = int(rng.integers(1, 17))
        support, least = random_support(rng, n)
        r = int(rng.integers(0, n + 2))
        matching = theory.matching_size(support)
        assert matching <= n - least
        assert theory.numerical_rank(theory.generic_matrix(rng, support, 0)) == matching
        assert theory.numerical_rank(theory.generic_matrix(rng, support, r)) == min(n, matching + r)
        assert theory.generic_rank(support, r) == min(n, matching + r)
        # Completion is about any S of rank k, here a product of dense factors.
        k, nothing = int(rng.integers(0, n + 1)), np.zeros((n, n), bool)
        completed = theory.generic_matrix(rng, nothing, k) + theory.generic_matrix(rng, nothing, r)
        assert theory.numerical_rank(completed) == min(n, k + r)
        deficient, planted = deficient + (matching < n), planted + (least > 0)
    assert 1000 < planted < deficient < 3000


def test_values_that_are_not_generic_have_less_rank():
    ones = np.ones((6, 6))
    assert theory.matching_size(ones > 0) == 6
    assert theory.numerical_rank(ones) == 1
    assert theory.numerical_rank(np.zeros((3, 3))) == 0
    assert theory.numerical_rank(np.diag([1.0, 1e-3, 1e-9]), relative_tolerance=1e-6) == 2


@pytest.mark.parametrize("head_dim", [1, 3])
def test_exponentials_are_generic(head_dim):
    """rank(Omega * exp(Q K^T)) = nu(Omega) for random Q, K of any dimension: genericity need not be assumed of S."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        n = int(rng.integers(1, 7))
        support, _ = random_support(rng, n)
        query, key = rng.normal(size=(2, n, head_dim))
        assert theory.numerical_rank(np.where(support, np.exp(query @ key.T), 0.0)) == theory.matching_size(support)


def test_safety_sparsifier():
    rng = np.random.default_rng(13)
    n, r = 96, 8
    p = theory.density_threshold(n, r)
    assert p < 1
    support = np.zeros((n, n), bool)
    support[:, 0] = True
    counts, failures = [], 0
    for _ in range(200):
        union = theory.with_safety(rng, support, p)
        assert union[support].all()
        counts.append(union.sum())
        failures += theory.deficiency(union) > r
    # Edges of the hash count once: those that come in addition are p (n^2 - |Omega|), not p n^2.
    expected = n + p * (n * n - n)
    assert abs(np.mean(counts) - expected) < 5 * math.sqrt(n * n * p * (1 - p) / 200)
    assert np.mean(counts) - n < theory.safety_edges(n, r) - 0.5 * n * p
    assert wilson_interval(failures, 200, z=4)[0] <= 1 / n
    assert theory.deficiency(support) == n - 1


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_library_applies_the_matrix_that_the_theory_builds(form):
    length = 512 if form in (Form("rank", 0, False), Form("bucket", 0, True)) else 75
    row = operator_row(0, length, form)
    assert row["same_support"]
    assert set(row["differences"]) == {"sparse", "low_rank", "elsaa", "convex", "sum", "lse"}
    assert max(row["differences"].values()) < 2e-6


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_matchings_of_real_supports(form):
    """Rank pairing of equally many, and every causal form, match all; a bucket may have more queries than keys."""
    deficiencies = []
    for seed, length in itertools.product(range(4), (1, 17, 100)):
        _, support = theory_operators(draw_tokens(seed, length), form)
        deficiencies.append(theory.deficiency(support))
    if form.is_causal or form.pairing == "rank":
        assert set(deficiencies) == {0}
    elif form.num_neighbors == 0:
        assert max(deficiencies) > 0


def test_rank_of_race():
    """L (2^P - 1) + 1 and not L 2^P, as each table's codes sum to 1; but full where it is causal, as a triangle is."""
    tokens = draw_tokens(0, 100)
    low_rank = theory.race_operator(tokens.query, tokens.key, tokens.race_planes)
    assert theory.numerical_rank(low_rank.matrix) == theory.race_rank(4, 4) == 61
    causal = theory.race_operator(tokens.query, tokens.key, tokens.race_planes, is_causal=True)
    assert np.all(np.diag(causal.matrix) > 0)
    assert not np.triu(causal.matrix, 1).any()
    np.testing.assert_allclose(low_rank.matrix.sum(1), 1.0, rtol=1e-4)


def test_low_rank_completes_the_sparse_branch():
    """The proposition for the real thing, whose factors are not generic: both together have rank min(n, nu + r)."""
    completed = 0
    for seed in range(6):
        matrices, support = theory_operators(draw_tokens(seed, 150), Form("bucket", 0, False))
        matching = theory.matching_size(support)
        assert theory.numerical_rank(matrices["sparse"]) == matching
        assert theory.numerical_rank(matrices["elsaa"]) == theory.generic_rank(support, 61)
        completed += matching < 150
    assert completed


def test_repeated_tokens_are_not_generic():
    matrices, support = theory_operators(draw_tokens(0, 128, vocabulary=16), Form("rank", 0, False))
    assert theory.deficiency(support) == 0
    assert theory.numerical_rank(matrices["elsaa"]) < 64


def test_the_true_share_leaves_the_error_of_the_rest():
    """Exact attention is alpha S + (1 - alpha) Rest with alpha = d_s / d, so that convex fusion with m = alpha errs by
    (1 - alpha) (RACE - Rest), while the paper's form adds alpha RACE to that."""
    tokens = draw_tokens(1, 40)
    matrices, support = theory_operators(tokens, Form("rank", 0, False))
    exact = theory.softmax_operator(tokens.query, tokens.key, np.ones((40, 40), bool))
    rest = theory.softmax_operator(tokens.query, tokens.key, ~support)
    sparse = theory.softmax_operator(tokens.query, tokens.key, support)
    share = np.exp(sparse.log_mass - exact.log_mass)[:, None]
    race = matrices["low_rank"]
    np.testing.assert_allclose(share * sparse.matrix + (1 - share) * rest.matrix, exact.matrix, atol=1e-12)
    convex = share * sparse.matrix + (1 - share) * race
    np.testing.assert_allclose(convex - exact.matrix, (1 - share) * (race - rest.matrix), atol=1e-12)
    paper = share * sparse.matrix + race
    np.testing.assert_allclose(paper - exact.matrix, (1 - share) * (race - rest.matrix) + share * race, atol=1e-12)


def test_a_query_without_keys():
    support = np.array([[True, False], [False, False]])
    operator = theory.softmax_operator(np.ones((2, 3)), np.ones((2, 3)), support)
    np.testing.assert_array_equal(operator.matrix, [[1.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(operator.log_mass, [math.sqrt(3), -np.inf])


MATRIX = np.full((3, 3), 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.angular_similarity(np.ones(3), np.ones((2, 3))), r"query has shape \(3,\); it must be"),
        (lambda: theory.angular_similarity(np.ones((2, 3)), np.zeros((2, 3))), "key has a row of length 0"),
        (lambda: theory.angular_similarity(np.ones((2, 3)), np.ones((2, 4))), "query has head_dim 3 and key 4"),
        (lambda: theory.collision_probability(1.5, 2), "similarity goes from 1.5 to 1.5; it must lie within"),
        (lambda: theory.collision_probability(0.5, 0), "num_bits is 0; it must be a finite number > 0"),
        (lambda: theory.edge_probability(0.5, 2, 0), "num_tables is 0; it must be an integer >= 1"),
        (lambda: theory.isotropic_mean(2, 2, 1), "head_dim is 1; it must be an integer >= 2"),
        (lambda: theory.matching_size(MATRIX), r"support has shape \(3, 3\) and dtype float64; it must be a boolean"),
        (lambda: theory.generic_rank(MATRIX > 0, -1), "r is -1; it must be an integer >= 0"),
        (lambda: theory.numerical_rank(MATRIX, -1.0), "relative_tolerance is -1.0"),
        (lambda: theory.independent_support(np.random.default_rng(0), 2 * MATRIX + 1), "probability goes from 2.0"),
        (lambda: theory.with_safety(np.random.default_rng(0), MATRIX > 0, -0.1), "density is -0.1"),
        (lambda: theory.delta_exact(MATRIX[:2], 0), r"probability has shape \(2, 3\); it must be a square matrix"),
        (lambda: theory.delta_exact(MATRIX * 4, 0), "probability goes from 2.0 to 2.0"),
        (lambda: theory.delta_exact(MATRIX, -1), "r is -1; it must be an integer >= 0"),
        (lambda: theory.delta_exact(np.zeros((11, 11)), 0), "n is 11; it must be at most 10"),
        (lambda: theory.delta_of_density(4, 0, 1.5), "density is 1.5; it must be a finite number >= 0.0 and <= 1.0"),
        (lambda: theory.density_threshold(0, 0), "n is 0; it must be an integer >= 1"),
        (lambda: theory.density_threshold(4, 0, 0.0), "c is 0.0; it must be a finite number > 0"),
        (lambda: theory.isotropic_threshold(4, 0, 1.0, 0.0), "delta is 0.0"),
        (lambda: theory.tables_needed(1.5, 2, 0.1), "least_similarity is 1.5"),
        (lambda: theory.certify(8, num_tables=1, num_bits=1, r=0, slack=2), "slack is 2"),
        (
            lambda: theory.fused_operator(
                *[theory.softmax_operator(MATRIX, MATRIX, MATRIX > 0)] * 2,
                kind="mean",  # type: ignore[arg-type]
            ),
            "kind is 'mean'; it must be one of",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
