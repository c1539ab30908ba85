"""Merge, multiplier and the four kinds of fusion."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import BranchOutput, ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig, reference
from tests.battery.cases import Case, options

KINDS = ("elsaa", "convex", "sum", "lse")


def branches(dtype=jnp.float32):
    """Two branches, with rows that have no keys in one, in the other, in both."""
    rng = np.random.default_rng(0)
    out = [jnp.asarray(rng.normal(size=(2, 5, 3, 4)), dtype) for _ in range(2)]
    masses = [rng.normal(size=(2, 5, 3)) * 20 for _ in range(2)]
    masses[0][0, 0], masses[1][0, 1] = -np.inf, -np.inf
    masses[0][0, 2] = masses[1][0, 2] = -np.inf
    masses[0][0, 3], masses[1][0, 3] = 1e4, -1e4
    masses[0][0, 4], masses[1][0, 4] = -1e4, 1e4
    masses = [jnp.asarray(x, jnp.float32) for x in masses]
    return [BranchOutput(jnp.where(jnp.isneginf(m)[..., None], 0, o), m) for o, m in zip(out, masses, strict=True)]


def test_merge_is_attention_over_the_union():
    case = Case("exact_attention", 20, 60, num_heads=4)
    query, key, value = case.arrays()

    def merged(query, key, value):
        parts = [elsaa_jax.exact_attention(query, key[:, s], value[:, s]) for s in (slice(0, 25), slice(25, 60))]
        return elsaa_jax.merge(*parts)

    def loss(function, *arrays):
        out, log_mass = function(*arrays)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(log_mass))

    chex.assert_trees_all_close(merged(query, key, value), case.run(query, key, value), atol=1e-5)
    grads = [jax.grad(lambda *a: loss(f, *a), argnums=(0, 1, 2))(query, key, value) for f in (merged, case.run)]  # noqa: B023
    chex.assert_trees_all_close(*grads, atol=2e-5)


def test_merge_of_rows_without_keys():
    first, second = branches()
    merged = elsaa_jax.merge(first, second)
    chex.assert_trees_all_close(merged, reference.merge(first, second), atol=1e-6)
    np.testing.assert_array_equal(merged.out[0, 2], 0.0)
    np.testing.assert_array_equal(merged.log_mass[0, 2], -np.inf)
    np.testing.assert_array_equal(merged.out[0, 0], second.out[0, 0])

    def loss(first, second):
        merged = elsaa_jax.merge(first, second)
        return jnp.sum(merged.out) + jnp.sum(jnp.where(jnp.isneginf(merged.log_mass), 0.0, merged.log_mass))

    grads = jax.grad(loss, argnums=(0, 1))(first, second)
    chex.assert_tree_all_finite(grads)
    np.testing.assert_array_equal(grads[0].log_mass[0, 2], 0.0)


def test_multiplier_is_the_ratio_of_masses():
    rng = np.random.default_rng(0)
    sparse, low_rank = (rng.normal(size=(2, 5, 3)) for _ in range(2))
    lam = rng.random((2, 5, 3)) + 0.1
    expected = np.exp(sparse) / (np.exp(sparse) + lam * np.exp(low_rank) + 1e-3)
    arrays = (jnp.asarray(x, jnp.float32) for x in (sparse, low_rank))
    multiplier = elsaa_jax.sparse_multiplier(*arrays, lam=jnp.asarray(lam, jnp.float32), eps=1e-3)
    np.testing.assert_allclose(multiplier, expected, rtol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_multiplier_at_the_edges(lam, eps):
    sparse, low_rank = (b.log_mass for b in branches())

    def run(sparse, low_rank, lam):
        return elsaa_jax.sparse_multiplier(sparse, low_rank, lam=lam, eps=eps)

    multiplier = run(sparse, low_rank, lam)
    chex.assert_tree_all_finite(multiplier)
    np.testing.assert_array_equal(multiplier[0, 0], 0.0)
    np.testing.assert_array_equal(multiplier[0, 2], 0.0)
    assert float(multiplier[0, 3].min()) == 1.0
    grads = jax.grad(lambda *a: run(*a).sum(), argnums=(0, 1, 2))(sparse, low_rank, jnp.float32(lam))
    chex.assert_tree_all_finite(grads)


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fuse_equals_the_reference(kind, stop):
    sparse, low_rank = branches()
    gates = jax.random.uniform(jax.random.key(0), (2, 2, 5, 1)).at[0, 0, 1].set(0.0)
    lam = jax.random.uniform(jax.random.key(1), (1, 1, 3)) + 0.1

    def run(module, sparse, low_rank, gates, lam):
        return module.fuse(
            sparse,
            low_rank,
            gate_sparse=gates[0],
            gate_low_rank=gates[1],
            lam=lam,
            kind=kind,
            stop_gradient_mass=stop,
        )

    out = run(elsaa_jax, sparse, low_rank, gates, lam)
    chex.assert_trees_all_close(out, run(reference, sparse, low_rank, gates, lam), atol=1e-5)
    arguments = (sparse, low_rank, gates, lam)
    grads = jax.grad(lambda *a: jnp.sum(jnp.sin(run(elsaa_jax, *a))), argnums=(0, 1, 2, 3))(*arguments)
    expected = jax.grad(lambda *a: jnp.sum(jnp.sin(run(reference, *a))), argnums=(0, 1, 2, 3))(*arguments)
    chex.assert_tree_all_finite(grads)
    chex.assert_trees_all_close(grads, expected, atol=1e-5)
    for branch in grads[:2]:
        assert (float(jnp.abs(branch.log_mass).max()) == 0.0) == (stop or kind == "sum")


@pytest.mark.parametrize("mass_scale", ["count", "mean"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_elsaa_equals_the_reference(is_causal, mass_scale):
    case = Case("elsaa_attention", 40 if is_causal else 100, 100, is_causal, "holes", num_heads=4)
    config = ElsaaConfig(
        race=RaceConfig(num_tables=3, num_bits=3, num_ensembles=2, chunk_size=32, beta=1.5),
        sparse=SortLshConfig(num_bits=4, block_size=8, min_length=20 * is_causal),
        fusion=FusionConfig(mass_scale=mass_scale, stop_gradient_mass=False),
    )
    planes = elsaa_jax.sample_planes(jax.random.key(0), (2, 6, 3, 16))
    query_mask = None if is_causal else case.key_mask()

    def run(module, *arrays):
        return module.elsaa_attention(
            *arrays,
            race_planes=planes,
            config=config,
            lam=0.5,
            gate_sparse=0.7,
            gate_low_rank=0.3,
            is_causal=is_causal,
            query_mask=query_mask,
            key_mask=case.key_mask(),
            return_branches=True,
        )

    arrays = case.arrays()
    out, parts = run(elsaa_jax, *arrays)
    expected, expected_parts = run(reference, *arrays)
    chex.assert_trees_all_close((out, parts), (expected, expected_parts), atol=1e-5)
    grads, expected = (
        jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(run(module, *a)[0])), argnums=(0, 1, 2)))(*arrays)  # noqa: B023
        for module in (elsaa_jax, reference)
    )
    chex.assert_trees_all_close(grads, expected, atol=2e-5)


def test_mean_masses_do_not_drift_with_the_length():
    planes = elsaa_jax.sample_planes(jax.random.key(0), (4, 4, 16))

    def multiplier(length, mass_scale):
        config = ElsaaConfig(
            sparse=SortLshConfig(block_size=16, min_length=16), fusion=FusionConfig(mass_scale=mass_scale)
        )
        # Flat logits: every key weighs the same.
        arrays = [x * 0.1 for x in Case("elsaa_attention", length, length, batch=1).arrays()]
        _, (sparse, low_rank) = elsaa_jax.elsaa_attention(
            *arrays, race_planes=planes, config=config, is_causal=True, return_branches=True
        )
        return float(elsaa_jax.sparse_multiplier(sparse.log_mass, low_rank.log_mass)[:, -16:].mean())

    assert multiplier(128, "count") - multiplier(1024, "count") > 0.2
    assert abs(multiplier(128, "mean") - multiplier(1024, "mean")) < 0.05


def test_shared_planes_are_the_first_of_the_race_planes():
    case = Case("elsaa_attention", 60, 60)
    race_planes = elsaa_jax.sample_planes(jax.random.key(0), (2, 3, 4, 16))
    config = ElsaaConfig(sparse=SortLshConfig(num_bits=5, block_size=8))
    shared = elsaa_jax.elsaa_attention(*case.arrays(), race_planes=race_planes, config=config)
    given = elsaa_jax.elsaa_attention(
        *case.arrays(), race_planes=race_planes, lsh_planes=race_planes.reshape(2, 12, 16)[:, :5], config=config
    )
    chex.assert_trees_all_equal(shared, given)


def test_recursive_algorithm_of_the_paper():
    case = Case("sort_lsh_attention", 128, 128, True, options=options(block_size=8, min_length=16, pairing="rank"))
    extra, kwargs = case.extra()
    arrays = case.arrays()
    kwargs = {name: kwargs[name] for name in ("block_size", "min_length")}
    literal = reference.causal_sort_lsh_recursive(*arrays, *extra, **kwargs)
    chex.assert_trees_all_close(case.run(*arrays), literal, atol=1e-5)
