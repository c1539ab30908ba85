"""RACE in chunks and parts of any size, compiled as users do."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import reference
from elsaa_jax.low_rank import race_xla
from tests.compilation import optimized


def results(function, arrays, cotangents):
    """Values, and derivatives of both results."""

    @optimized
    def run(*arrays):
        branch, vjp = jax.vjp(function, *arrays)
        return branch, vjp(elsaa_jax.BranchOutput(*cotangents))

    return run(*arrays)


@pytest.mark.parametrize(
    ("rows", "part"), [(32_768, 1024), (256, 64), (96, 16), (24, 1)], ids=["one", "some", "uneven", "many"]
)
@pytest.mark.parametrize("lengths", [(48, 48), (53, 31)], ids=["48x48", "53x31"])
def test_chunks_and_parts(rows, part, lengths, monkeypatch):
    monkeypatch.setattr(race_xla, "ROWS_AT_A_TIME", rows)
    monkeypatch.setattr(race_xla, "PART", part)
    jax.clear_caches()  # The sizes are no part of their keys.
    rngs = jax.random.split(jax.random.key(0), 6)
    num_queries, num_keys = lengths
    arrays = [
        jax.random.normal(rng, (2, length, heads, 16))
        for rng, length, heads in zip(rngs, (num_queries, num_keys, num_keys), (4, 2, 2), strict=False)
    ]
    planes = elsaa_jax.sample_planes(rngs[3], (2, 4, 3, 16))
    cotangents = jax.random.normal(rngs[4], arrays[0].shape), jax.random.normal(rngs[5], arrays[0].shape[:3])
    mask = jnp.arange(num_keys)[None, :] < jnp.asarray([num_keys, num_keys - 7])[:, None]
    options = {"num_ensembles": 2, "key_mask": mask}

    def ours(*arrays):
        return elsaa_jax.race_attention(*arrays, implementation="xla", **options)

    def slowly(*arrays):
        return reference.race_attention(*arrays, **options)

    expected = results(slowly, (*arrays, planes), cotangents)
    chex.assert_trees_all_close(results(ours, (*arrays, planes), cotangents), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("length", [1, 7, 1000, 1025, 8193, 100_003])
@pytest.mark.parametrize("batch", [1, 3, 100_000])
def test_parts_hold_all_tokens_and_little_more(length, batch):
    parts, size = race_xla._parts(jax.ShapeDtypeStruct((batch, length, 4, 64), jnp.float32))
    assert size % parts == 0
    assert size * batch * 4 <= max(race_xla.ROWS_AT_A_TIME, parts * batch * 4)
    chunks = -(-length // size)
    assert (chunks * size - length) < parts * (chunks + 1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_all_derivatives_equal_those_of_the_definition(is_causal):
    rng = np.random.default_rng(3)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 37, 2, 8)), jnp.float32) for _ in range(3))
    planes = jnp.asarray(rng.normal(size=(2, 3, 2, 8)) / 2, jnp.float32)
    weights = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, 37, 2, 8), (1, 37, 2))]

    def loss(function, **options):
        def of(query, key, value, planes, beta, eps):
            out, log_mass = function(query, key, value, planes, beta=beta, eps=eps, is_causal=is_causal, **options)
            return jnp.sum(out * weights[0]) + jnp.sum(log_mass * weights[1])

        return jax.grad(of, argnums=range(6))(query, key, value, planes, jnp.float32(1.5), jnp.float32(0.1))

    ours = loss(elsaa_jax.race_attention, chunk_size=8, implementation="xla")
    chex.assert_trees_all_close(ours, loss(reference.race_attention), atol=1e-4, rtol=1e-4)
