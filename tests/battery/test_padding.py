"""Padding, masks and bad tokens: they change nothing for valid tokens of other rows or their own."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import ElsaaConfig, FusionConfig, SortLshConfig, elsaa_attention
from tests.battery.cases import Case, options

LENGTHS = (333, 200)
FULL = 333


def sparse_options(is_causal, pairing):
    return options(block_size=16, min_length=32 if is_causal else 0, pairing=pairing)


def cases():
    for is_causal in (False, True):
        yield Case("exact_attention", FULL, FULL, is_causal)
        yield Case("race_attention", FULL, FULL, is_causal, options=options(chunk_size=32))
        yield Case("performer_attention", FULL, FULL, is_causal)
        for pairing in ("rank", "bucket"):
            yield Case("sort_lsh_attention", FULL, FULL, is_causal, options=sparse_options(is_causal, pairing))


def call(case, arrays, mask):
    """The case's function with the given mask for queries and keys."""
    extra, kwargs = case.extra()
    kwargs["key_mask"] = mask
    if case.function == "sort_lsh_attention":
        kwargs["query_mask"] = mask
    return getattr(elsaa_jax, case.function)(*arrays, *extra, **kwargs)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_a_padded_batch_equals_each_row_alone(case):
    arrays = case.arrays()
    mask = jnp.arange(FULL)[None, :] < jnp.asarray(LENGTHS)[:, None]
    # What stands in the padding must not matter, not even if it is no number.
    batch = call(case, tuple(jnp.where(mask[:, :, None, None], x, jnp.nan) for x in arrays), mask)
    for row, length in list(enumerate(LENGTHS))[1:]:
        alone = call(case, tuple(x[row : row + 1, :length] for x in arrays), None)
        chex.assert_trees_all_close(jax.tree.map(lambda x: x[row : row + 1, :length], batch), alone, atol=1e-5)  # noqa: B023


@pytest.mark.parametrize("case", [case for case in cases() if case.is_causal], ids=str)
def test_nan_stays_in_its_row(case):
    arrays = case.arrays()
    spoiled = tuple(x.at[1, 5].set(jnp.nan) for x in arrays)

    def loss(*arrays):
        return jnp.sum(case.run(*arrays).out[0])

    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[0], case.run(*a)) for a in (arrays, spoiled)))
    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*spoiled)
    chex.assert_tree_all_finite(jax.tree.map(lambda x: x[0], grads))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["elsaa", "convex", "sum", "lse"])
def test_rows_without_keys_are_zero(kind, is_causal):
    case = Case("race_attention", 80, 80)
    planes = elsaa_jax.sample_planes(jax.random.key(0), (3, 3, 16))
    config = ElsaaConfig(sparse=SortLshConfig(block_size=16), fusion=FusionConfig(kind=kind, stop_gradient_mass=False))
    mask = jnp.ones((2, 80), bool).at[1].set(False)

    def run(*arrays):
        return elsaa_attention(*arrays, race_planes=planes, config=config, is_causal=is_causal, key_mask=mask)

    out = run(*case.arrays())
    np.testing.assert_array_equal(out[1], 0.0)
    assert np.abs(out[0]).min(axis=(1, 2)).max() > 0
    grads = jax.jit(jax.grad(lambda *a: jnp.sum(run(*a) ** 2), argnums=(0, 1, 2)))(*case.arrays())
    chex.assert_tree_all_finite(grads)
    np.testing.assert_array_equal(grads[1][1], 0.0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_large_blocks_make_the_sparse_branch_exact(is_causal):
    case = Case("exact_attention", 100, 100, is_causal, "holes", num_heads=4)
    planes = elsaa_jax.sample_planes(jax.random.key(0), (5, 16))

    def run(function, *arrays):
        out, log_mass = function(*arrays)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(log_mass), 0, jnp.cos(log_mass))), (out, log_mass)

    def grads(function):
        return jax.jit(jax.value_and_grad(lambda *a: run(function, *a), argnums=(0, 1, 2), has_aux=True))(
            *case.arrays()
        )

    exact = grads(case.run)
    for min_length in (0, 16):
        sparse = grads(
            lambda *a: elsaa_jax.sort_lsh_attention(
                *a,
                planes,
                block_size=128,
                min_length=min_length,  # noqa: B023
                is_causal=is_causal,
                key_mask=case.key_mask(),
            )
        )
        chex.assert_trees_all_close(sparse, exact, atol=2e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_masked_tokens_have_no_gradient(is_causal):
    # Not even where they are no numbers.
    mask = jnp.arange(60)[None, :] < jnp.asarray([[60], [41]])
    arrays = tuple(
        jnp.where(mask[:, :, None, None], x, jnp.nan) for x in Case("elsaa_attention", 60, 60, is_causal).arrays()
    )
    planes = elsaa_jax.sample_planes(jax.random.key(0), (3, 3, 16))
    config = ElsaaConfig(sparse=SortLshConfig(block_size=8, min_length=16 * is_causal))

    def loss(*arrays):
        out = elsaa_attention(
            *arrays, race_planes=planes, config=config, is_causal=is_causal, query_mask=mask, key_mask=mask
        )
        return jnp.sum(jnp.where(mask[:, :, None, None], out, 0) ** 2)

    for grad in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays):
        chex.assert_tree_all_finite(grad)
        np.testing.assert_array_equal(grad[1, 41:], 0.0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_race_without_a_floor(is_causal):
    case = Case("race_attention", 30, 30, is_causal, "row", options=options(eps=0.0))
    value, grads = jax.value_and_grad(lambda *a: jnp.sum(case.run(*a).out), argnums=(0, 1, 2))(*case.arrays())
    chex.assert_tree_all_finite((value, grads))


def test_blocks_and_neighbours_are_no_longer_than_the_sequence():
    case = Case("exact_attention", 6, 6)
    planes = elsaa_jax.sample_planes(jax.random.key(0), (3, 16))
    run = jax.jit(lambda *a: elsaa_jax.sort_lsh_attention(*a, planes, block_size=2**20, num_neighbors=10**6))
    assert run.lower(*case.arrays()).compile().memory_analysis().temp_size_in_bytes < 2**20
    chex.assert_trees_all_close(run(*case.arrays()), case.run(*case.arrays()), atol=1e-5)


def test_one_mask_for_both_takes_the_plain_blocks():
    # Equal masks that are two objects take the general path: both must agree.
    case = Case("sort_lsh_attention", 200, 200, False, "padding", options=options(block_size=16))
    extra, kwargs = case.extra()
    same = elsaa_jax.sort_lsh_attention(*case.arrays(), *extra, **kwargs)
    kwargs["query_mask"] = jnp.array(kwargs["key_mask"])
    other = elsaa_jax.sort_lsh_attention(*case.arrays(), *extra, **kwargs)
    chex.assert_trees_all_close(same, other, atol=1e-6)
