"""Large logits, zeros, equal tokens; derivatives against finite differences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import ElsaaConfig, FusionConfig, SortLshConfig
from tests.battery.cases import Case, options

FUNCTIONS = {
    "exact_attention": (),
    "race_attention": options(chunk_size=16),
    "performer_attention": (),
    "sort_lsh_attention": options(block_size=8, min_length=16),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_log_mass_against_finite_differences(function):
    case = Case(function, 40, 40, True, options=FUNCTIONS[function])
    arrays = case.arrays()
    # A direction that flips no hash bit: along the vectors themselves.
    direction = tuple(x / 10 for x in arrays)
    weights = jax.random.normal(jax.random.key(0), arrays[0].shape[:3])

    @jax.jit
    def loss(step):
        moved = (x + step * d for x, d in zip(arrays, direction, strict=True))
        return jnp.sum(weights * case.run(*moved).log_mass)

    step = 2e-2
    # Fourth order, because float32 asks for a large step.
    rise = 8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))
    np.testing.assert_allclose(jax.grad(loss)(0.0), rise / (12 * step), rtol=5e-3, atol=5e-3)


def extremes():
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(3, 1, 60, 2, 16))
    big = normal / np.linalg.norm(normal, axis=-1, keepdims=True) * 200.0  # logits up to 1e4
    yield "large", big
    yield "zeros", np.zeros_like(normal)
    yield "equal", np.broadcast_to(normal[:, :, :1], normal.shape)
    yield "one token", np.where(np.arange(60)[None, None, :, None, None] == 30, big, 0.0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("elsaa", jnp.float32), ("elsaa", jnp.bfloat16), ("lse", jnp.float32)], ids=str
)
def test_extreme_inputs_stay_finite(kind, is_causal, dtype):
    planes = elsaa_jax.sample_planes(jax.random.key(0), (4, 4, 16))
    config = ElsaaConfig(
        sparse=SortLshConfig(block_size=8, min_length=16 * is_causal),
        fusion=FusionConfig(kind=kind, stop_gradient_mass=False),
    )

    @jax.jit
    def run(query, key, value, beta):
        def loss(query, key, value, beta):
            out, branches = elsaa_jax.elsaa_attention(
                query,
                key,
                value,
                race_planes=planes,
                config=config,
                is_causal=is_causal,
                beta=beta,
                return_branches=True,
            )
            exact = elsaa_jax.exact_attention(query, key, value, is_causal=is_causal)
            masses = sum(jnp.sum(b.log_mass) for b in (*branches, exact))
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(exact.out.astype(jnp.float32)) + masses, (out, branches)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(query, key, value, beta)

    for name, arrays in extremes():
        for beta in (1.0, 20.0):
            result = run(*(jnp.asarray(x, dtype) for x in arrays), jnp.float32(beta))
            chex.assert_tree_all_finite(result, custom_message=f"{name}, beta {beta}")


@pytest.mark.parametrize("is_causal", [False, True])
def test_performer_stays_finite(is_causal):
    projection = elsaa_jax.sample_projection(jax.random.key(0), 32, 16)

    @jax.jit
    def run(*arrays):
        def loss(*arrays):
            branch = elsaa_jax.performer_attention(*arrays, projection, is_causal=is_causal)
            return jnp.sum(branch.out) + jnp.sum(jnp.where(jnp.isneginf(branch.log_mass), 0, branch.log_mass))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*arrays)

    for name, arrays in extremes():
        chex.assert_tree_all_finite(run(*(jnp.asarray(x, jnp.float32) for x in arrays)), custom_message=name)


def test_performer_estimates_softmax_attention():
    rng = np.random.default_rng(0)
    arrays = tuple(jnp.asarray(0.7 * rng.normal(size=(1, 64, 1, 16)), jnp.float32) for _ in range(3))
    exact = elsaa_jax.exact_attention(*arrays)

    def error(num_features):
        projections = (elsaa_jax.sample_projection(jax.random.key(s), num_features, 16) for s in range(4))
        branches = [elsaa_jax.performer_attention(*arrays, p) for p in projections]
        return np.mean([np.abs(b.out - exact.out).mean() for b in branches])

    assert error(2048) < 0.02
    assert error(2048) < error(32) / 3
