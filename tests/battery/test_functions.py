"""Every function against its O(N^2) definition: values, log-masses and gradients of both."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elsaa_jax import reference
from tests.battery import definitions
from tests.battery.cases import CASES, Case, options

# The interpreter of the kernels is slow, and 1,000 tokens are many blocks already.
INTERPRETED = [c for c in CASES if c.function != "performer_attention" and c.num_keys < 4096]
CALLS = [*((c, None) for c in CASES), *((c, "interpret") for c in INTERPRETED)]


def loss_of(case, branch, query):
    """A function of both outputs, other in each entry, that is finite where a query has no key."""
    rng = np.random.default_rng(11)
    out_weights = jnp.asarray(rng.normal(size=query.shape), jnp.float32)
    mass_weights = jnp.asarray(rng.normal(size=query.shape[:3]), jnp.float32)
    log_mass = jnp.where(jnp.isneginf(branch.log_mass), 0.0, branch.log_mass)
    return jnp.sum(jnp.sin(branch.out.astype(jnp.float32)) * out_weights) + jnp.sum(jnp.cos(log_mass) * mass_weights)


def value_and_grads(case, run, arrays):
    def loss(*arrays):
        branch = run(*arrays)
        return loss_of(case, branch, arrays[0]), branch

    derive = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (_, branch), grads = jax.jit(derive)(*arrays)
    return branch, dict(zip(("query", "key", "value"), grads, strict=True))


@pytest.mark.parametrize(("case", "implementation"), CALLS, ids=str)
def test_equals_the_reference(case, implementation):
    arrays = case.arrays()
    branch, grads = value_and_grads(case, functools.partial(case.run, implementation=implementation), arrays)
    expected, expected_grads = value_and_grads(case, case.run_reference, arrays)
    chex.assert_shape(branch.out, arrays[0].shape)
    chex.assert_shape(branch.log_mass, arrays[0].shape[:3])
    chex.assert_type(list(branch), jnp.float32)
    chex.assert_trees_all_close(branch, expected, atol=1e-5, rtol=1e-5)
    chex.assert_tree_all_finite(grads)
    # A gradient is a sum over up to 4,096 terms, so it is compared on its own scale.
    for name, grad in grads.items():
        scale = max(1.0, float(jnp.abs(expected_grads[name]).max()))
        chex.assert_trees_all_close(grad / scale, expected_grads[name] / scale, atol=1e-5)


def in_float64(case):
    """The branch by the float64 definitions."""
    query, key, value = (np.asarray(x, np.float64) for x in case.arrays())
    extra, kwargs = case.extra()
    allowed = definitions.allowed_pairs(query.shape, key.shape[1], case.is_causal, case.key_mask())
    planes = [np.asarray(x, np.float64) for x in extra]
    if case.function == "exact_attention":
        return definitions.softmax_attention(query, key, value, allowed)
    if case.function == "performer_attention":
        return definitions.performer_attention(query, key, value, *planes, allowed)
    if case.function == "race_attention":
        sharpness = {"beta": kwargs.get("beta", 1.0), "num_ensembles": kwargs.get("num_ensembles", 1)}
        return definitions.race_attention(query, key, value, *planes, allowed, **sharpness, eps=kwargs.get("eps", 1e-6))
    names = ("block_size", "min_length", "num_neighbors", "pairing", "is_causal", "query_mask", "key_mask")
    support = reference.sort_lsh_support(
        *case.arrays()[:2], *extra, **{name: kwargs[name] for name in names if name in kwargs}
    )
    return definitions.softmax_attention(query, key, value, support)


@pytest.mark.parametrize("case", [c for c in CASES if c.num_keys == 100], ids=str)
def test_equals_float64_definitions(case):
    out, log_mass = in_float64(case)
    branch = case.run(*case.arrays())
    np.testing.assert_allclose(branch.out, out, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(branch.log_mass, log_mass, atol=1e-4, rtol=1e-4)


BF16_CASES = [
    Case("exact_attention", 100, 100, True, "holes", num_heads=4),
    Case("race_attention", 100, 100, False, "holes", num_heads=4),
    Case("race_attention", 100, 100, True, num_heads=4),
    Case("performer_attention", 65, 65, True),
    Case("sort_lsh_attention", 100, 100, False, "padding", num_heads=4, options=options(block_size=16)),
    Case("sort_lsh_attention", 100, 100, True, num_heads=4, options=options(block_size=8)),
]


BF16_CALLS = [*((c, None) for c in BF16_CASES), *((c, "interpret") for c in BF16_CASES if "performer" not in str(c))]


@pytest.mark.parametrize(("case", "implementation"), BF16_CALLS, ids=str)
def test_bfloat16_within_its_precision(case, implementation):
    arrays = case.arrays(jnp.bfloat16)
    branch, grads = value_and_grads(case, functools.partial(case.run, implementation=implementation), arrays)
    chex.assert_type([branch.out, *grads.values()], jnp.bfloat16)
    chex.assert_type(branch.log_mass, jnp.float32)
    # The same rounded inputs in float32: what is left is the rounding of weights and output.
    expected, expected_grads = value_and_grads(case, case.run_reference, tuple(x.astype(jnp.float32) for x in arrays))
    np.testing.assert_allclose(branch.out.astype(jnp.float32), expected.out, atol=0.03)
    np.testing.assert_allclose(branch.log_mass, expected.log_mass, atol=0.03)
    for name, grad in grads.items():
        scale = max(1.0, float(jnp.abs(expected_grads[name]).max()))
        np.testing.assert_allclose(grad.astype(jnp.float32) / scale, expected_grads[name] / scale, atol=0.03)
