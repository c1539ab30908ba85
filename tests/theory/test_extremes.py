"""Arguments at the edge of what is allowed: NumPy integers, tiny and huge numbers, empty sums, rows without keys."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import BranchOutput, theory
from elsaa_jax.config import FUSION_KINDS


@pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint16, np.uint32])
def test_numpy_integers_give_what_python_integers_give(integer):
    n, r = (integer(x) for x in (60_000, 61))
    assert theory.safety_edges(n, integer(0)) == theory.safety_edges(60_000, 0)
    assert theory.density_threshold(n, r, np.float32(1)) == theory.density_threshold(60_000, 61)
    assert theory.isotropic_threshold(n, r) == theory.isotropic_threshold(60_000, 61)
    assert theory.delta_of_density(n, r, np.float64(0.001)) == theory.delta_of_density(60_000, 61, 0.001)
    assert theory.smallest_density(n, r, 0.5) == theory.smallest_density(60_000, 61, 0.5)
    found = theory.certify(n, num_tables=integer(4), num_bits=integer(4), r=r, c=integer(1))
    assert found == theory.certify(60_000, num_tables=4, num_bits=4, r=61, c=1)
    assert theory.race_rank(integer(4), integer(4)) == theory.race_rank(4, 4)
    assert theory.generic_rank(np.eye(3, dtype=bool), integer(1)) == 3


def test_numpy_integers_do_not_overflow():
    assert theory.safety_edges(np.int32(65_536), 0) == pytest.approx(8_519_280, abs=1)
    assert theory.certify(np.int64(65_536), num_tables=4, num_bits=4, r=61, c=1).certified
    assert theory.race_rank(np.int32(1), np.int32(40)) == 2**40


def test_more_tables_than_a_float_holds_are_infinitely_many():
    assert theory.tables_needed(0.5, 1100, 0.02) == math.inf
    assert theory.tables_needed(1e-155, 2, 0.9) == math.inf
    # The power is too small for an accurate float, but the number of tables is not too large for one.
    assert theory.tables_needed(0.5, 1070, 1e-20) == pytest.approx(1e-20 * 2.0**1000 * 2.0**70, rel=1e-9)
    assert theory.tables_needed(0.0, 2, 0.0) == theory.tables_needed(0.5, 1100, 0.0) == 1.0


def test_an_upper_bound_never_underflows():
    assert theory.log_delta_bound(np.ones((800, 800)), 0) == pytest.approx(-792.6, abs=0.1)
    assert theory.log_delta_of_density(800, 0, 1.0) == pytest.approx(-792.6, abs=0.1)
    # Two rows or columns of 800: all other sizes are smaller by e^-700.
    assert theory.log_delta_of_density(800, 0, 1.0) == pytest.approx(math.log(2 * 800) - 800)
    for delta in (theory.delta_bound(np.ones((800, 800)), 0), theory.delta_of_density(800, 0, 1.0)):
        assert 0 < delta <= math.ulp(0.0)
    assert theory.delta_of_density(30, 2, 0.4) == pytest.approx(math.exp(theory.log_delta_of_density(30, 2, 0.4)))
    assert theory.delta_of_density(2000, 0, 0.0) == math.inf
    assert math.isfinite(theory.log_delta_of_density(2000, 0, 0.0))


def test_the_certificate_states_the_bound_of_the_theorem():
    certificate = theory.certify(800, num_tables=1000, num_bits=1, r=0)
    assert certificate.log_delta == theory.log_delta_of_density(800, 0, certificate.density)
    assert certificate.log_delta == pytest.approx(-792.6, abs=0.1)


@pytest.mark.parametrize(("n", "r"), [(1, 1), (5, 5), (5, 9), (50, 61)])
def test_a_low_rank_part_of_full_rank_leaves_an_empty_sum(n, r):
    """With r >= n no pair of sizes is admissible: Delta is 0, and every threshold is 0."""
    q = np.zeros((min(n, 10), min(n, 10)))
    assert theory.delta_exact(q, r) == theory.delta_bound(q, r) == theory.delta_of_density(n, r, 0.0) == 0.0
    assert theory.log_delta_bound(q, r) == theory.log_delta_of_density(n, r, 0.0) == -math.inf
    assert theory.density_threshold(n, r) == theory.isotropic_threshold(n, r) == theory.safety_edges(n, r) == 0.0
    assert theory.isotropic_threshold(n, r, every_pair=False) == 0.0
    assert theory.smallest_density(n, r, 1e-9) == 0.0
    certificate = theory.certify(n, num_tables=1, num_bits=30, r=r)
    assert certificate.certified
    assert certificate.confidence == 1.0
    assert certificate.log_delta == -math.inf


def test_a_confidence_of_zero_certifies_nothing():
    certificate = theory.certify(1, num_tables=100, num_bits=1, r=0, delta=0.5)
    assert certificate.density >= certificate.threshold
    assert certificate.confidence == 0
    assert not certificate.certified


@pytest.mark.parametrize("delta", [0, 1, 1.0, -0.1, 1.5, math.nan, True])
def test_delta_lies_strictly_between_0_and_1(delta):
    message = f"delta is {delta}; it must be a number above 0 and below 1"
    with pytest.raises(ValueError, match=message):
        theory.isotropic_threshold(8, 0, 1.0, delta)
    with pytest.raises(ValueError, match=message):
        theory.certify(8, num_tables=1, num_bits=1, r=0, delta=delta)


EMPTY, FULL = -np.inf, 0.5


@pytest.mark.parametrize("kind", FUSION_KINDS)
def test_fusion_of_rows_without_mass_is_that_of_the_library(kind):
    """Every combination of branches without keys, closed gates, lambda 0 and eps 0 gives the library's weights."""
    rng = np.random.default_rng(0)
    matrices = rng.random((2, 1, 3))
    for masses in itertools.product((EMPTY, FULL), repeat=2):
        branches = [
            theory.Operator(matrix * np.isfinite(mass), np.array([mass]))
            for matrix, mass in zip(matrices, masses, strict=True)
        ]
        for gate_sparse, gate_low_rank, lam, eps in itertools.product((0.0, 0.7), (0.0, 0.9), (0.0, 1.3), (0.0, 1e-6)):
            options = {"gate_sparse": gate_sparse, "gate_low_rank": gate_low_rank, "lam": lam, "eps": eps, "kind": kind}
            found = theory.fused_operator(*branches, **options)
            arrays = [
                BranchOutput(jnp.asarray(x.matrix, jnp.float32)[None, :, None], jnp.asarray(x.log_mass)[None, :, None])
                for x in branches
            ]
            expected = np.asarray(elsaa_jax.fuse(*arrays, **options))[0, :, 0]
            np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=str((masses, options)))


def test_race_rows_without_mass_are_zero():
    """Codes so sharp that query and key share no bucket, and no floor under the denominator."""
    planes = np.eye(2)[None]
    operator = theory.race_operator([[50.0, 50.0]], [[-50.0, -50.0]], planes, beta=400.0, eps=0.0)
    np.testing.assert_array_equal(operator.matrix, [[0.0]])
    np.testing.assert_array_equal(operator.log_mass, [-np.inf])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_matrix_has_rank_0(shape):
    assert theory.numerical_rank(np.zeros(shape)) == 0


def test_race_rank_refuses_sizes_below_1():
    with pytest.raises(ValueError, match="num_tables is -1; it must be an integer >= 1"):
        theory.race_rank(-1, 4)
    with pytest.raises(ValueError, match="num_bits is 0; it must be an integer >= 1"):
        theory.race_rank(4, 0)
