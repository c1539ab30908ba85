"""Inputs at the edge of what is computed: NaN in one example, exact boundaries, underflow, lambda 0, derivatives."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import elsaa_jax
from elsaa_jax import BranchOutput, ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from elsaa_jax import nnx as elsaa_nnx
from tests.battery import definitions

CONFIG = ElsaaConfig(
    race=RaceConfig(num_tables=2, num_bits=3, chunk_size=16), sparse=SortLshConfig(num_bits=4, block_size=8)
)
PLANES = elsaa_jax.sample_planes(jax.random.key(0), (2, 3, 16))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_nan_in_one_example_stays_there(framework, is_causal):
    x = jax.random.normal(jax.random.key(1), (3, 20, 32))
    if framework == "linen":
        layer = elsaa_jax.ELSAA(2, config=CONFIG, is_causal=is_causal)
        attend = functools.partial(layer.apply, layer.init(jax.random.key(0), x))
    else:
        attend = elsaa_nnx.ELSAA(2, 32, config=CONFIG, is_causal=is_causal, rngs=nnx.Rngs(0))
    out = attend(x.at[1].set(jnp.nan))
    assert jnp.isnan(out[1]).all()
    chex.assert_tree_all_finite(out[::2])
    np.testing.assert_array_equal(out[::2], attend(x)[::2])
    np.testing.assert_allclose(out[::2], attend(x[::2]), atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_log_mass_of_sharp_codes(implementation, is_causal):
    # Queries and keys on opposite sides of all three planes: a mass of about exp(-93), and a gradient of it.
    beta, num_bits, length = 20.0, 3, 16
    rng = np.random.default_rng(0)
    planes = np.eye(num_bits, 16, dtype=np.float32)[None] * 1.12
    query, key, value = rng.normal(size=(3, 1, length, 1, 16), scale=0.02).astype(np.float32)
    query[..., :num_bits] += 1
    key[..., :num_bits] -= 1
    options = {"beta": beta, "is_causal": is_causal}

    def log_mass(key):
        return elsaa_jax.race_attention(query, key, value, planes, implementation=implementation, **options).log_mass

    def defined(key):
        allowed = definitions.allowed_pairs(query.shape, length, is_causal, None)
        arrays = (np.asarray(x, np.float64) for x in (query, key, value, planes))
        return definitions.race_attention(*arrays, allowed, beta=beta, num_ensembles=1)[1]

    expected = defined(key)
    assert -97 < expected.min() < -92
    np.testing.assert_allclose(log_mass(key), expected, rtol=1e-3)
    grad = jax.grad(lambda key: jnp.sum(log_mass(key)))(key)
    step = np.zeros(key.shape)
    for token, channel in ((0, 0), (5, 2), (length - 1, 1)):
        step[0, token, 0, channel] = 1e-5
        slope = (defined(key + step).sum() - defined(key - step).sum()) / 2e-5
        step[0, token, 0, channel] = 0
        assert abs(slope) > 0.1
        np.testing.assert_allclose(grad[0, token, 0, channel], slope, rtol=1e-2)


def branches():
    rng = np.random.default_rng(3)
    outs = rng.normal(size=(2, 1, 4, 2, 16)).astype(np.float32)
    masses = rng.normal(size=(2, 1, 4, 2)).astype(np.float32)
    return [BranchOutput(jnp.asarray(out), jnp.asarray(mass)) for out, mass in zip(outs, masses, strict=True)]


def attend_with_lambda(lam, kind, stop_gradient_mass):
    x = jax.random.normal(jax.random.key(2), (1, 20, 2, 16))
    fusion = FusionConfig(kind=kind, stop_gradient_mass=stop_gradient_mass)
    config = ElsaaConfig(race=CONFIG.race, sparse=CONFIG.sparse, fusion=fusion)
    return elsaa_jax.elsaa_attention(x, x, x, race_planes=PLANES, config=config, lam=lam)


LAMBDA_CALLS = {
    "multiplier": lambda lam: elsaa_jax.sparse_multiplier(*(b.log_mass for b in branches()), lam=lam),
    **{f"fuse-{kind}": functools.partial(lambda lam, kind: elsaa_jax.fuse(*branches(), lam=lam, kind=kind), kind=kind)
       for kind in ("elsaa", "convex", "lse")},
    **{f"attention-{kind}-{stop}": functools.partial(attend_with_lambda, kind=kind, stop_gradient_mass=stop)
       for kind in ("elsaa", "convex", "lse") for stop in (True, False)},
}  # fmt: skip


@pytest.mark.parametrize("name", LAMBDA_CALLS)
def test_derivative_at_lambda_0(name):
    def total(lam):
        out = LAMBDA_CALLS[name](lam)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    slope = jax.grad(total)(0.0)
    step = 2e-3
    # One-sided, of second order: lambda is not negative.
    expected = (4 * total(step) - total(2 * step) - 3 * total(0.0)) / (2 * step)
    assert abs(expected) > 0.05
    np.testing.assert_allclose(slope, expected, rtol=0.02, atol=5e-3)


ATTENTIONS = {
    "exact": lambda x, **kw: elsaa_jax.exact_attention(x, x, x, **kw),
    "race": lambda x, **kw: elsaa_jax.race_attention(x, x, x, PLANES, **kw),
    "sort_lsh": lambda x, **kw: elsaa_jax.sort_lsh_attention(x, x, x, PLANES[0], block_size=4, **kw),
    "elsaa": lambda x, **kw: elsaa_jax.elsaa_attention(x, x, x, race_planes=PLANES, config=CONFIG, **kw),
}
X = jax.random.normal(jax.random.key(5), (2, 12, 2, 16))
# Each takes a scalar function of an array, and the array.
FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(lambda t: f(x * t))(1.0),
}
SECOND = {
    "hessian": lambda f, x: jax.hessian(lambda t: f(x * t))(1.0),
    "grad of grad": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x),
    "jit of grad of grad": lambda f, x: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)))(x),
    "grad of vjp": lambda f, x: jax.grad(lambda x: jax.vjp(f, x)[1](1.0)[0].sum())(x),
}


def scalar(name, is_causal):
    def loss(x):
        branch = ATTENTIONS[name](x, is_causal=is_causal)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(branch))

    return loss


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("transform", FORWARD)
def test_forward_mode_is_refused(name, is_causal, transform):
    with pytest.raises(TypeError, match=r"no forward-mode derivative .*use reverse mode \(jax.grad.*reference"):
        FORWARD[transform](scalar(name, is_causal), X)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("transform", SECOND)
def test_second_derivatives_are_refused(name, is_causal, transform):
    with pytest.raises(
        TypeError, match=r"no second derivative .*use the quadratic definitions in elsaa_jax\.reference"
    ):
        SECOND[transform](scalar(name, is_causal), X)


REVERSE = {
    "jit": lambda f, x: jax.jit(jax.grad(f))(x),
    "vmap of grad": lambda f, x: jax.vmap(lambda x: jax.grad(f)(x[None])[0])(x),
    "grad of vmap": lambda f, x: jax.grad(lambda x: jnp.sum(jax.vmap(lambda x: f(x[None]))(x)))(x),
    "remat": lambda f, x: jax.grad(jax.checkpoint(f))(x),
    "vmap of grad of remat": lambda f, x: jax.vmap(lambda x: jax.grad(jax.checkpoint(f))(x[None])[0])(x),
    "grad of scan": lambda f, x: jax.grad(lambda x: jax.lax.scan(lambda s, x: (s + f(x[None]), None), 0.0, x)[0])(x),
}


@pytest.mark.parametrize(
    ("name", "is_causal"), [("exact", False), ("race", True), ("sort_lsh", False), ("elsaa", True)]
)
def test_reverse_mode_works_under_transforms(name, is_causal):
    loss = scalar(name, is_causal)
    expected = jax.grad(loss)(X)
    assert jnp.abs(expected).max() > 0.1
    for transform, derive in REVERSE.items():
        np.testing.assert_allclose(derive(loss, X), expected, atol=1e-5, err_msg=transform)
