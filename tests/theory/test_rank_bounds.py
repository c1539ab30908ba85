"""The theorem and its corollaries: every formula against a brute-force computation that shares no code with it."""

import itertools
import math

import numpy as np
import pytest

from elsaa_jax import theory
from elsaa_jax.theory import rank_bounds
from experiments.engine.stats import wilson_interval
from tests.theory.graphs import brute_matching, subsets


def brute_delta(q, r):
    """Delta_r as it is printed, set by set."""
    n, total = len(q), []
    for rows, columns in itertools.product(subsets(n), repeat=2):
        if len(rows) >= r + 1 and len(columns) >= r + 1 and len(rows) + len(columns) >= n + r + 1:
            total.append(math.exp(-sum(q[i, j] for i in rows for j in columns)))
    return math.fsum(total)


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_delta_by_enumeration(n):
    q = np.random.default_rng(6).random((n, n))
    for r in range(n):
        assert theory.delta_exact(q, r) == pytest.approx(brute_delta(q, r), rel=1e-12)


def test_grouped_delta():
    rng = np.random.default_rng(7)
    for n, r in ((3, 0), (8, 0), (8, 3), (10, 9)):
        q = rng.random((n, n)) ** 2
        assert theory.delta_exact(q, r) <= theory.delta_bound(q, r) * (1 + 1e-12)
        assert theory.delta_bound(q, r) <= theory.delta_of_density(n, r, q.min()) * (1 + 1e-12)
        uniform = np.full((n, n), 0.3)
        # All rectangles of a size weigh the same: grouping loses nothing.
        exact = theory.delta_exact(uniform, r)
        assert theory.delta_bound(uniform, r) == pytest.approx(exact)
        assert theory.delta_of_density(n, r, 0.3) == pytest.approx(exact)
    n, r = 30, 2
    pairs = [(a, h) for a, h in itertools.product(range(r + 1, n + 1), repeat=2) if a + h >= n + r + 1]
    expected = math.fsum(math.comb(n, a) * math.comb(n, h) * math.exp(-0.4 * a * h) for a, h in pairs)
    assert theory.delta_of_density(n, r, 0.4) == pytest.approx(expected)
    assert theory.delta_of_density(2000, 0, 0.0) == math.inf


def test_least_masses_are_lower_bounds():
    q = np.random.default_rng(8).random((5, 5))
    masses = rank_bounds.least_masses(q)
    for a, h in itertools.product(range(1, 6), repeat=2):
        rectangles = itertools.product(itertools.combinations(range(5), a), itertools.combinations(range(5), h))
        least = min(q[np.ix_(rows, columns)].sum() for rows, columns in rectangles)
        assert masses[a - 1, h - 1] <= least + 1e-12
        if 1 in (a, h) or 5 in (a, h):
            assert masses[a - 1, h - 1] == pytest.approx(least)


def test_the_theorem_by_all_graphs():
    """P[nu < n - r] over all 512 graphs of three rows, against Delta_r: no chance is left."""
    graphs = np.array(list(itertools.product((False, True), repeat=9))).reshape(-1, 3, 3)
    matching = np.array([brute_matching(graph) for graph in graphs])
    rng = np.random.default_rng(9)
    told = 0
    for _ in range(200):
        q = rng.random((3, 3)) ** rng.choice([0.02, 0.2, 1.0])
        probability = np.where(graphs, q, 1 - q).prod((1, 2))
        assert probability.sum() == pytest.approx(1)
        for r in range(3):
            delta = theory.delta_exact(q, r)
            assert probability[matching < 3 - r].sum() <= delta
            told += delta < 1
    assert told > 100


@pytest.mark.parametrize(("n", "r"), [(8, 0), (24, 0), (24, 3)])
def test_the_theorem_by_simulation(n, r):
    """The bound holds, and it is not idle: at its own threshold failures do happen, or would at 60 % of it."""
    rng = np.random.default_rng([10, n, r])
    threshold = theory.smallest_density(n, r, 0.5)
    frequencies = {}
    for factor in (0.6, 1.0, 1.2):
        density = factor * threshold
        supports = theory.independent_support(rng, np.full((600, n, n), density))
        successes = sum(theory.deficiency(support) <= r for support in supports)
        assert wilson_interval(successes, 600, z=4)[1] >= 1 - theory.delta_of_density(n, r, density)
        frequencies[factor] = successes / 600
    assert frequencies[0.6] < 0.97


def test_binomial_rectangle_lemma():
    for n in (1, 2, 7, 40):
        log_choices = rank_bounds.log_binomials(n)
        np.testing.assert_allclose(log_choices, [math.log(math.comb(n, t)) for t in range(n + 1)], atol=1e-12)
        for least in range(1, n + 1):
            for a in range(least, n + 1):
                for h in range(max(least, n + least - a), n + 1):
                    bound = 8 * a * h / n * math.log(math.e * n / least)
                    assert math.log(math.comb(n, a)) + math.log(math.comb(n, h)) <= bound


def test_density_threshold():
    # (8 log(e 100 / 5) + 3 log(100) / 5) / 100
    expected = (8 * (1 + math.log(20)) + 0.6 * math.log(100)) / 100
    assert theory.density_threshold(100, 4, 1.0) == pytest.approx(expected)
    for n, r, c in itertools.product((64, 200), (0, 1, 30, 63), (0.5, 1.0, 2.0)):
        p = theory.density_threshold(n, r, c)
        if p <= 1:
            assert theory.delta_of_density(n, r, p) <= n**-c
            assert theory.smallest_density(n, r, n**-c) <= p
    # As printed it exceeds 1 for short inputs, where no Bernoulli variable has it.
    assert theory.density_threshold(32, 0, 1.0) > 1
    assert theory.safety_edges(32, 0, 1.0) == 32**2
    assert theory.safety_edges(1000, 0) == pytest.approx(1000 * (8 * math.log(math.e * 1000) + 3 * math.log(1000)))


def test_smallest_density():
    density = theory.smallest_density(20, 1, 0.05)
    assert theory.delta_of_density(20, 1, density) <= 0.05 < theory.delta_of_density(20, 1, 0.999 * density)
    assert theory.smallest_density(2, 0, 1e-3) == math.inf


def test_tables_needed():
    for rho, bits, p in ((0.3, 2, 0.4), (0.5, 4, 0.02), (0.9, 1, 0.99), (0.5, 1, 1e-6)):
        tables = theory.tables_needed(rho, bits, p)
        assert tables == next(n for n in itertools.count(1) if 1 - math.exp(-n * rho**bits) >= p)
        assert theory.edge_probability(rho, bits, int(tables)) >= p
    assert theory.tables_needed(0.0, 2, 0.4) == theory.tables_needed(0.5, 2, 1.0) == math.inf


def brute_theta(n, r, c, delta):
    best = 0.0
    for a, h in itertools.product(range(r + 1, n + 1), repeat=2):
        if a + h >= n + r + 1:
            choices = math.log(math.comb(n, a)) + math.log(math.comb(n, h))
            tau = (choices + (c + 2) * math.log(n)) / (a * h)
            best = max(best, tau + math.sqrt((choices + math.log(n**2 / delta)) / (2 * a * h)))
    return best


@pytest.mark.parametrize(("n", "r"), [(1, 0), (2, 1), (9, 0), (30, 0), (30, 7), (31, 30)])
def test_isotropic_threshold(n, r):
    for c, delta in ((0.5, 0.3), (2.0, 1e-4)):
        expected = brute_theta(n, r, c, delta)
        assert theory.isotropic_threshold(n, r, c, delta) == pytest.approx(expected)
        assert theory.isotropic_threshold(n, r, c, delta, every_pair=False) == pytest.approx(expected)


def test_the_edge_holds_the_maximum():
    """Beyond n = 4,096 the edge a + h = n + R alone is searched: up to there it gives the same."""
    rng = np.random.default_rng(11)
    sizes = [(int(n), int(rng.integers(0, n))) for n in rng.integers(2, 400, 60)]
    for n, r in [*sizes, (2048, 0), (4096, 0), (4096, 60), (4096, 4000)]:
        every = theory.isotropic_threshold(n, r, every_pair=True)
        assert theory.isotropic_threshold(n, r, every_pair=False) == pytest.approx(every, rel=1e-12)


def test_rectangle_means_deviate_as_hoeffding_says():
    """Of independent q_ij with one mean, some rectangle falls below it by beta in at most delta of all draws."""
    n, r, delta, draws = 7, 3, 0.5, 400
    rng = np.random.default_rng(12)
    members = np.array([[i in rows for i in range(n)] for rows in subsets(n)], float)
    size = members.sum(1)
    admissible = (size[:, None] > r) & (size > r) & (size[:, None] + size >= n + r + 1)
    choices = np.array([math.log(math.comb(n, int(t))) for t in size])
    area = np.maximum(size[:, None] * size, 1)
    beta = np.sqrt((choices[:, None] + choices + math.log(n**2 / delta)) / (2 * area))
    failures = 0
    for _ in range(draws):
        q = rng.integers(0, 2, (n, n))  # mean 1/2, as far from it as can be
        failures += np.any((members @ q @ members.T / area < 0.5 - beta) & admissible)
    assert wilson_interval(failures, draws, z=4)[0] <= delta
