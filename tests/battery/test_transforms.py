"""jit, vmap, scan, remat, pmap: one function, one result; one trace for each shape."""

import chex
import jax
import jax.numpy as jnp
import pytest

import elsaa_jax
from tests.battery.cases import Case
from tests.compilation import optimized

CONFIG = elsaa_jax.ElsaaConfig(
    race=elsaa_jax.RaceConfig(chunk_size=32), sparse=elsaa_jax.SortLshConfig(block_size=16, min_length=24)
)


def attend(is_causal, *arrays):
    planes = elsaa_jax.sample_planes(jax.random.key(0), (4, 4, 16))
    return elsaa_jax.elsaa_attention(*arrays, race_planes=planes, config=CONFIG, is_causal=is_causal)


def gradient(is_causal, *arrays):
    return jax.grad(lambda *a: jnp.sum(jnp.sin(attend(is_causal, *a))), argnums=(0, 1, 2))(*arrays)


@pytest.fixture(params=[False, True], ids=["full", "causal"])
def is_causal(request):
    return request.param


@pytest.fixture
def arrays():
    return Case("elsaa_attention", 100, 100, batch=4).arrays()


def test_transforms_agree(is_causal, arrays):
    def run(*arrays):
        return attend(is_causal, *arrays), gradient(is_causal, *arrays)

    jitted = optimized(run)
    expected = jitted(*arrays)
    chex.assert_trees_all_equal(expected, jitted(*arrays))  # A second call, bit for bit.
    chex.assert_trees_all_close(run(*arrays), expected, atol=1e-5)

    in_two = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), arrays)
    join = lambda tree: jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), tree)  # noqa: E731
    chex.assert_trees_all_close(join(jax.jit(jax.vmap(run))(*in_two)), expected, atol=1e-5)
    scanned = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, run(*x)), 0, xs)[1])(in_two)
    chex.assert_trees_all_close(join(scanned), expected, atol=1e-5)
    assert jax.device_count() >= 2
    chex.assert_trees_all_close(join(jax.pmap(run)(*in_two)), expected, atol=1e-5)

    remat = jax.checkpoint(lambda *a: attend(is_causal, *a))
    grads = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(remat(*a))), argnums=(0, 1, 2)))(*arrays)
    chex.assert_trees_all_close(grads, expected[1], atol=1e-5)


def test_one_trace_for_each_shape(is_causal):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=2)
    def run(*arrays):
        return attend(is_causal, *arrays)

    for seed in range(3):
        for length in (50, 90):
            run(*(x + seed for x in Case("elsaa_attention", length, length).arrays()))


def test_memory_of_the_backward_pass_does_not_keep_scores():
    # The residuals of one call: q, k, v, out and O(N) integers, but no N x block scores.
    length, block = 2048, 256
    arrays = Case("sort_lsh_attention", length, length, batch=1).arrays()
    planes = elsaa_jax.sample_planes(jax.random.key(0), (4, 16))
    _, residuals = jax.vjp(lambda *a: elsaa_jax.sort_lsh_attention(*a, planes, block_size=block).out, *arrays)
    kept = sum(x.nbytes for x in jax.tree.leaves(residuals))
    assert kept < 8 * arrays[0].nbytes, (kept, arrays[0].nbytes)
    assert 4 * length * 2 * block > 8 * arrays[0].nbytes
