"""Inputs that are broadcast in the same program are as good as those in memory.

XLA of jaxlib 0.10 gets some products wrong whose factor is a broadcast that it fuses.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import elsaa_jax
from tests.compilation import optimized

PLANES = elsaa_jax.sample_planes(jax.random.key(9), (3, 3, 16))
FUNCTIONS = {
    "exact": elsaa_jax.exact_attention,
    "sort_lsh": functools.partial(elsaa_jax.sort_lsh_attention, planes=PLANES[0], block_size=32),
    "race": functools.partial(elsaa_jax.race_attention, planes=PLANES),
    "elsaa": functools.partial(elsaa_jax.elsaa_attention, race_planes=PLANES),
}


@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_broadcast_in_the_program(name, is_causal, axis):
    length = 256
    small = jax.random.normal(
        jax.random.key(0), (3, *(1 if i == axis else n for i, n in enumerate((3, length, 4, 16))))
    )
    run = functools.partial(FUNCTIONS[name], is_causal=is_causal)

    def loss(arrays):
        return jnp.sum(jnp.sin(jax.tree.leaves(run(*arrays))[0]))

    derive = jax.value_and_grad(loss)
    wide = jnp.broadcast_to(small, (3, 3, length, 4, 16))
    value, grads = optimized(derive)(wide)
    for part in range(3):
        # One of the three is broadcast in the program.
        def inside(small, wide, part=part):
            arrays = [jnp.broadcast_to(small, x.shape) if i == part else x for i, x in enumerate(wide)]
            return loss(arrays), jax.grad(loss)(arrays)[part]

        found, grad = optimized(inside)(small[part], wide)
        chex.assert_trees_all_close(found, value, rtol=1e-5)
        scale = jnp.maximum(1.0, jnp.abs(grads[part]).max())
        chex.assert_trees_all_close(grad / scale, grads[part] / scale, atol=1e-5)
