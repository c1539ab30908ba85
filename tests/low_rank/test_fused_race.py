"""The fusion inside the readout of RACE: values and gradients of everything that is fused, against the reference."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig, reference
from tests.battery.cases import Case

PLANES = elsaa_jax.sample_planes(jax.random.key(0), (2, 3, 3, 16))


def config_of(kind="elsaa", stop=True, mass_scale="count", num_ensembles=1, is_causal=False):
    return ElsaaConfig(
        race=RaceConfig(num_tables=3, num_bits=3, num_ensembles=num_ensembles, chunk_size=32),
        sparse=SortLshConfig(num_bits=4, block_size=8, min_length=20 * is_causal),
        fusion=FusionConfig(kind=kind, mass_scale=mass_scale, stop_gradient_mass=stop),
    )


def numbers_of(shape):
    """Gates with zeros among them, lambda with a zero, and beta."""
    gates = jax.random.uniform(jax.random.key(1), (2, *shape)).at[0, 0, 1].set(0.0).at[1, 0, 2].set(0.0)
    return gates, jax.random.uniform(jax.random.key(2), shape).at[0, 3].set(0.0), jnp.float32(1.5)


def value_and_grads(module, case, config, arrays, **extra):
    query_mask = None if case.is_causal else case.key_mask()
    planes = PLANES[:, : config.race.num_tables * config.race.num_ensembles]

    def loss(arrays, planes, gates, lam, beta):
        out = module.elsaa_attention(
            *arrays,
            race_planes=planes,
            lsh_planes=jax.lax.stop_gradient(planes).reshape(2, -1, 16)[:, :4],
            config=config,
            lam=lam,
            gate_sparse=gates[0],
            gate_low_rank=gates[1],
            beta=beta,
            is_causal=case.is_causal,
            query_mask=query_mask,
            key_mask=case.key_mask(),
            **extra,
        )
        weights = np.random.default_rng(5).normal(size=out.shape).astype(np.float32)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)) * weights), out

    derive = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))
    (_, out), grads = derive(arrays, planes, *numbers_of(arrays[0].shape[:3]))
    return out, dict(zip(("arrays", "planes", "gates", "lam", "beta"), grads, strict=True))


def kernels_of(case, config, **extra):
    """The names of the kernels that are traced."""
    arrays = case.arrays()
    run = jax.make_jaxpr(lambda *a: elsaa_jax.elsaa_attention(*a, race_planes=PLANES, config=config, **extra))
    return {name for name in ("race_readout", "race_fused_readout") if f"name={name}" in str(run(*arrays))}


def assert_close(found, expected, atol):
    for name, grad in expected.items():
        for x, y in zip(jax.tree.leaves(found[name]), jax.tree.leaves(grad), strict=True):
            scale = max(1.0, float(jnp.abs(y).max()))
            np.testing.assert_allclose(
                x.astype(jnp.float32) / scale, y.astype(jnp.float32) / scale, atol=atol, err_msg=name
            )


FULL, CAUSAL = (
    Case("elsaa_attention", 77, 100, False, None, num_heads=4),
    Case("elsaa_attention", 61, 100, True, "holes"),
)
MASKED = Case("elsaa_attention", 65, 65, False, "holes", num_heads=4)


@pytest.mark.parametrize(
    ("case", "kind", "stop", "mass_scale"),
    [
        (FULL, "elsaa", True, "count"),
        (FULL, "convex", True, "mean"),
        (FULL, "sum", True, "count"),
        (CAUSAL, "elsaa", False, "mean"),
        (MASKED, "elsaa", True, "mean"),
        (MASKED, "convex", True, "count"),
    ],
    ids=str,
)
def test_equals_the_reference(case, kind, stop, mass_scale):
    config = config_of(kind, stop, mass_scale, is_causal=case.is_causal)
    arrays = case.arrays()
    out, grads = value_and_grads(elsaa_jax, case, config, arrays, implementation="interpret")
    expected, expected_grads = value_and_grads(reference, case, config, arrays)
    chex.assert_trees_all_close(out, expected, atol=1e-5)
    chex.assert_tree_all_finite(grads)
    assert_close(grads, expected_grads, 1e-5)


@pytest.mark.parametrize("case", [FULL, CAUSAL], ids=str)
def test_bfloat16_within_its_precision(case):
    config = config_of(is_causal=case.is_causal)
    arrays = case.arrays(jnp.bfloat16)
    out, grads = value_and_grads(elsaa_jax, case, config, arrays, implementation="interpret")
    chex.assert_type([out, *grads["arrays"]], jnp.bfloat16)
    expected, expected_grads = value_and_grads(reference, case, config, tuple(x.astype(jnp.float32) for x in arrays))
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.03)
    assert_close(grads, expected_grads, 0.03)


def test_xla_in_the_fused_form():
    config, arrays = config_of(stop=False), FULL.arrays()
    assert kernels_of(FULL, config) == {"race_fused_readout"}
    out, grads = value_and_grads(elsaa_jax, FULL, config, arrays)
    expected, expected_grads = value_and_grads(reference, FULL, config, arrays)
    chex.assert_trees_all_close(out, expected, atol=1e-5)
    assert_close(grads, expected_grads, 1e-5)


def test_it_is_fused_where_that_saves_bytes():
    fused, apart = {"race_fused_readout"}, {"race_readout"}
    assert kernels_of(FULL, config_of(), implementation="interpret") == fused
    assert kernels_of(FULL, config_of(), implementation="pallas") == fused
    assert kernels_of(FULL, config_of("sum"), implementation="interpret") == fused
    assert kernels_of(FULL, config_of("lse"), implementation="interpret") == apart
    assert kernels_of(FULL, config_of("convex", stop=False), implementation="interpret") == apart
    assert kernels_of(FULL, config_of(num_ensembles=3), implementation="interpret") == apart
    assert kernels_of(FULL, config_of(), implementation="interpret", return_branches=True) == apart
    assert kernels_of(FULL, config_of()) == fused
