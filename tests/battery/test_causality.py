"""Strict causality, to the last bit, and what a prefix and the last queries must give."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from tests.battery.cases import Case, options
from tests.compilation import optimized

SPARSE = options(block_size=16, min_length=32)
FUNCTIONS = {
    "exact_attention": (),
    "race_attention": options(chunk_size=64),
    "performer_attention": (),
    "sort_lsh_attention": SPARSE,
}
CAUSAL_CONFIG = elsaa_jax.ElsaaConfig(
    race=elsaa_jax.RaceConfig(chunk_size=64),
    sparse=elsaa_jax.SortLshConfig(block_size=16, min_length=32),
    short_conv=3,
)


def disturb(x, place, seed):
    """Other, larger tokens after `place` (axis 1)."""
    noise = 3 * jax.random.normal(jax.random.key(seed), x.shape, x.dtype)
    later = (jnp.arange(x.shape[1]) > place).reshape(1, -1, *(1,) * (x.ndim - 2))
    return jnp.where(later, noise, x)


CALLS = [*((f, n, None) for f in FUNCTIONS for n in (1024, 501))]
CALLS += [(f, 201, "interpret") for f in FUNCTIONS if f != "performer_attention"]


@pytest.mark.parametrize(("function", "length", "implementation"), CALLS)
def test_the_future_changes_no_bit_of_the_past(function, length, implementation):
    case = Case(function, length, length, True, options=FUNCTIONS[function])
    arrays = case.arrays()
    run = optimized(functools.partial(case.run, implementation=implementation))
    before = run(*arrays)
    for place in (0, 17, length // 2, length - 2):
        after = run(*(disturb(x, place, seed) for seed, x in enumerate(arrays)))
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[:, : place + 1], b) for b in (before, after)))  # noqa: B023


@pytest.mark.parametrize("attention", elsaa_jax.ATTENTION_KINDS)
def test_the_future_changes_no_bit_of_a_layer(attention):
    length = 301
    layer = elsaa_jax.ELSAA(num_heads=4, num_kv_heads=2, is_causal=True, attention=attention, config=CAUSAL_CONFIG)
    x = jax.random.normal(jax.random.key(0), (2, length, 32))
    variables = layer.init(jax.random.key(1), x)
    run = optimized(layer.apply)
    before = run(variables, x)
    for place in (0, 100, length - 2):
        after = run(variables, disturb(x, place, 3))
        chex.assert_trees_all_equal(before[:, : place + 1], after[:, : place + 1])


def test_rank_pairing_leaks():
    # The paper's pairing in the causal split: the test above must be able to fail.
    case = Case("sort_lsh_attention", 1024, 1024, True, options=(*SPARSE, ("pairing", "rank")))
    arrays = case.arrays()
    run = optimized(case.run)
    before, after = run(*arrays), run(*(disturb(x, 1000, seed) for seed, x in enumerate(arrays)))
    assert not np.array_equal(before.out[:, :1001], after.out[:, :1001])


@pytest.mark.parametrize(("function", "implementation"), [(f, i) for f, n, i in CALLS if n != 1024])
def test_no_gradient_from_the_past_to_the_future(function, implementation):
    length, place = 201, 120
    case = Case(function, length, length, True, options=FUNCTIONS[function])

    def of_past(*arrays):
        branch = case.run(*arrays, implementation=implementation)
        return branch.out[:, place].sum() + branch.log_mass[:, place].sum()

    grads = optimized(jax.grad(of_past, argnums=(0, 1, 2)))(*case.arrays())
    for grad in grads:
        np.testing.assert_array_equal(grad[:, place + 1 :], 0.0)
        assert np.abs(grad[:, : place + 1]).max() > 0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_prefix_does_not_depend_on_the_length(function):
    case = Case(function, 700, 700, True, options=FUNCTIONS[function])
    arrays = case.arrays()
    whole = case.run(*arrays)
    for length in (513,):
        prefix = case.run(*(x[:, :length] for x in arrays))
        chex.assert_trees_all_close(prefix, jax.tree.map(lambda x: x[:, :length], whole), atol=1e-5)  # noqa: B023


@pytest.mark.parametrize("function", FUNCTIONS)
def test_fewer_queries_are_the_last_ones(function):
    length = 333
    case = Case(function, length, length, True, "padding", num_heads=4, options=FUNCTIONS[function])
    query, key, value = case.arrays()
    whole = case.run(query, key, value)
    for num_queries in (1, 200):
        last = Case(function, num_queries, length, True, "padding", num_heads=4, options=FUNCTIONS[function])
        part = last.run(query[:, -num_queries:], key, value)
        if function == "sort_lsh_attention":  # There the case masks padded queries only where T = S.
            part = jax.tree.map(lambda x: x[:1], part)
            expected = jax.tree.map(lambda x: x[:1, -num_queries:], whole)  # noqa: B023
        else:
            expected = jax.tree.map(lambda x: x[:, -num_queries:], whole)  # noqa: B023
        chex.assert_trees_all_close(part, expected, atol=1e-5)
