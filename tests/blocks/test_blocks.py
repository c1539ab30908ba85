import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elsaa_jax.arrays.packing import pack
from elsaa_jax.blocks import one_block as blocks
from tests.compilation import optimized

SCALE = 0.25


def arrays_of(dtype=jnp.float32, num_queries=7, num_keys=5):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(3, num_queries, 8), (3, num_keys, 8), (3, num_keys, 8), (3, num_queries, 8)]
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def biases():
    """No mask; masked keys, in one block all of them; a triangle."""
    masked = jnp.zeros((3, 1, 5)).at[0, 0, 2:].set(-jnp.inf).at[1].set(-jnp.inf)
    triangle = jnp.where(jnp.arange(5)[None, :] <= jnp.arange(7)[:, None], 0.0, -jnp.inf)[None]
    return {"all": jnp.zeros((1, 1, 1)), "masked": masked, "triangle": triangle}


def plainly(query, key, value, bias):
    logits = jnp.einsum("ath,ash->ats", query, key) * SCALE + bias
    weights = jnp.nan_to_num(jax.nn.softmax(logits, axis=-1))
    return jnp.einsum("ats,ash->ath", weights, value), jax.scipy.special.logsumexp(logits, axis=-1)


@pytest.mark.parametrize("name", biases())
def test_forward(name):
    query, key, value, _ = arrays_of()
    bias = biases()[name]
    out, log_mass = blocks.forward(query, key, value, bias, SCALE)
    chex.assert_trees_all_close((out, log_mass), plainly(query, key, value, bias), atol=1e-5)


def test_large_logits():
    query, key, value, _ = arrays_of()
    bias = biases()["masked"]
    result = blocks.forward(query * 1e3, key * 10, value, bias, SCALE)
    chex.assert_trees_all_close(result, plainly(query * 1e3, key * 10, value, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", [blocks._derive, blocks._derive_fused])
@pytest.mark.parametrize("name", biases())
def test_backward(name, form, dtype):
    query, key, value, d_out = arrays_of(dtype)
    bias = biases()[name]
    *wide, wide_d_out = (x.astype(jnp.float32) for x in (query, key, value, d_out))

    def loss(*arrays):
        seen = ~jnp.isneginf(bias).all(axis=-1, keepdims=True)
        return jnp.sum(jnp.where(seen, plainly(*arrays, jnp.where(seen, bias, 0.0))[0] * wide_d_out, 0.0))

    out, log_mass = blocks.forward(*wide, bias, SCALE)
    log_mass = jnp.where(jnp.isneginf(log_mass), jnp.inf, log_mass)
    shift = jnp.sum(out * wide_d_out, axis=-1)
    scaled = (query * SCALE, key, value, bias, log_mass, d_out, shift)
    d_query, *d_keys = form(*scaled)
    derivatives = (d_query * SCALE, *d_keys)
    chex.assert_type(derivatives, jnp.float32)
    atol = 1e-5 if dtype == jnp.float32 else 0.05
    chex.assert_trees_all_close(derivatives, jax.grad(loss, argnums=(0, 1, 2))(*wide), atol=atol)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the form is for XLA's CPU compiler")
def test_no_scores_in_memory():
    x = jax.ShapeDtypeStruct((4, 1024, 64), jnp.float32)
    rows = jax.ShapeDtypeStruct((4, 1024), jnp.float32)
    bias = jnp.zeros((1, 1, 1))
    scores = 4 * 4 * 1024 * 1024

    def forward(query, key, value):
        return blocks.forward(query, key, value, bias, SCALE)

    def backward(query, key, value, log_mass, d_out, shift):
        return blocks.backward(query, key, value, bias, SCALE, log_mass, d_out, shift)

    for function, arguments in ((forward, (x, x, x)), (backward, (x, x, x, rows, x, rows))):
        memory = optimized(function).lower(*arguments).compile().memory_analysis()
        assert memory.temp_size_in_bytes < scores, function


def test_pack_is_the_identity():
    parts = [jnp.ones((2, 3, 4)), jnp.full((2, 3), 2.0), jnp.full((2, 3, 1), 3.0)]
    wide, thin, last = pack(*parts)
    chex.assert_trees_all_equal((wide, thin[..., 0], last), tuple(parts))

    def loss(*parts):
        return sum(jnp.sum(jnp.sin(x) * (i + 1.0)) for i, x in enumerate(pack(*parts)))

    expected = [np.cos(x) * (i + 1.0) for i, x in enumerate(parts)]
    chex.assert_trees_all_close(list(jax.grad(loss, argnums=(0, 1, 2))(*parts)), expected, atol=1e-6)
