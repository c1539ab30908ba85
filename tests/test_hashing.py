"""Hyperplanes, codes and their order."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import reference
from elsaa_jax.dispatch import XLA
from elsaa_jax.sparse import orders, pairing
from elsaa_jax.sparse.call import SparseCall
from elsaa_jax.sparse.full import full_plan
from elsaa_jax.sparse.levels import causal_plan
from elsaa_jax.types import CallFacts


@pytest.mark.parametrize("num_bits", [1, 2, 5, 8])
def test_gray_rank_is_the_inverse_of_the_gray_sequence(num_bits):
    ranks = np.arange(2**num_bits)
    sequence = ranks ^ (ranks >> 1)
    np.testing.assert_array_equal(elsaa_jax.gray_rank(jnp.asarray(sequence), num_bits), ranks)
    np.testing.assert_array_equal(reference.gray_rank(sequence, num_bits), ranks)
    flips = [bin(a ^ b).count("1") for a, b in itertools.pairwise(sequence)]
    assert set(flips) <= {1}


@pytest.mark.parametrize("heads", [(), (2,)], ids=["shared", "heads"])
def test_hard_codes(heads):
    x = jax.random.normal(jax.random.key(0), (3, 50, 2, 8))
    planes = elsaa_jax.sample_planes(jax.random.key(1), (*heads, 6, 8))
    codes = elsaa_jax.hard_codes(x, planes)
    chex.assert_shape(codes, (3, 50, 2))
    chex.assert_type(codes, jnp.int32)
    np.testing.assert_array_equal(codes, reference.hard_codes(x, planes))
    # The codes do not depend on the length of a vector.
    np.testing.assert_array_equal(codes, elsaa_jax.hard_codes(7.5 * x, planes))


@pytest.mark.parametrize("heads", [(), (2,)], ids=["shared", "heads"])
def test_soft_codes(heads):
    x = jax.random.normal(jax.random.key(0), (3, 50, 2, 8))
    planes = elsaa_jax.sample_planes(jax.random.key(1), (*heads, 4, 3, 8))
    codes = elsaa_jax.soft_codes(x, planes, 1.7)
    chex.assert_shape(codes, (3, 50, 2, 4, 8))
    chex.assert_trees_all_close(codes, reference.soft_codes(x, planes, 1.7), atol=1e-6)
    np.testing.assert_allclose(codes.sum(-1), 1.0, atol=1e-6)
    # The heaviest bucket of a table is the hard code of the table's planes.
    for table in range(4):
        hard = elsaa_jax.hard_codes(x, planes[..., table, :, :])
        np.testing.assert_array_equal(codes[..., table, :].argmax(-1), hard)


def test_planes_are_standard_normal():
    planes = elsaa_jax.sample_planes(jax.random.key(0), (40, 50, 60))
    chex.assert_type(planes, jnp.float32)
    assert abs(float(planes.mean())) < 0.02
    assert abs(float(planes.std()) - 1) < 0.02


def test_projection_is_orthogonal_with_gaussian_norms():
    projection = elsaa_jax.sample_projection(jax.random.key(0), 40, 16)
    chex.assert_shape(projection, (40, 16))
    for start in (0, 16, 32):
        rows = projection[start : start + 16]
        gram = np.asarray(rows @ rows.T)
        np.testing.assert_allclose(gram - np.diag(np.diag(gram)), 0.0, atol=1e-4)
    many = elsaa_jax.sample_projection(jax.random.key(1), 4096, 16)
    assert abs(float(jnp.mean(jnp.sum(many**2, axis=1))) - 16) < 0.5


@pytest.mark.parametrize("bound", [100, 10**5, 2**24])
def test_floor_ratio_is_exact(bound):
    rng = np.random.default_rng(0)
    denominator = rng.integers(1, 2 * bound, 10_000)
    numerator = rng.integers(0, bound, 10_000)
    r = rng.integers(0, denominator)
    # Products that the denominator divides, where a rounded quotient falls on either side.
    r[:5000], numerator[:5000] = denominator[:5000] - 1, np.minimum(denominator[:5000], bound)
    arrays = (jnp.asarray(x, jnp.int32) for x in (r, numerator, denominator))
    np.testing.assert_array_equal(pairing.floor_ratio(*arrays), r * numerator // denominator)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pair", ["rank", "bucket"])
def test_keys_that_do_not_pack_sort_the_same(pair, is_causal, monkeypatch):
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.integers(0, 8, (2, 2, 90)), jnp.int32) for _ in range(2))
    mask = jnp.asarray(rng.random((2, 90)) < 0.8)
    facts = CallFacts(90, 90, 2, 2, 16, is_causal, 1.0)
    call = SparseCall(facts, 8, 1, pair, 12, False, False, XLA)
    sorts = []

    def plan():
        calls = []
        sort = jax.lax.sort
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                orders.lax, "sort", lambda x, **options: calls.append(isinstance(x, tuple)) or sort(x, **options)
            )
            tokens = orders.sort_both(call, query, key, 3, mask, mask)
            made = (causal_plan if is_causal else full_plan)(call, tokens, mask, mask)
        sorts.append(calls)
        return made

    packed = plan()
    monkeypatch.setattr(orders, "PACKED_LIMIT", 0)
    chex.assert_trees_all_equal(packed, plan())
    assert sorts == [[False, False], [True, True]]  # One integer, then rank and position apart.
