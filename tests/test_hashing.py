"""Hyperplanes, codes and their order."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import reference


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
