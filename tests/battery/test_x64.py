"""JAX_ENABLE_X64=1: every attention takes float32 and bfloat16, keeps their dtype, and gives the same numbers."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import elsaa_jax
from elsaa_jax import ElsaaConfig, RaceConfig, SortLshConfig
from elsaa_jax import nnx as elsaa_nnx

LENGTH, HEADS, HEAD_DIM = 40, 2, 16
CONFIG = ElsaaConfig(
    race=RaceConfig(num_tables=2, num_bits=3, chunk_size=16), sparse=SortLshConfig(num_bits=4, block_size=8)
)
FUNCTIONS = ("exact", "race", "sort_lsh", "elsaa", "performer")
NAMES = [
    *(f"{kind}-{form}" for kind in FUNCTIONS for form in ("full-float32", "causal-float32", "causal-bfloat16")),
    *(f"{kind}-causal-float32" for kind in ("exact_kernel", "race_kernel", "sort_lsh_kernel", "sort_lsh_rank")),
    *("linen-full-float32", "linen-causal-bfloat16", "nnx-full-bfloat16", "nnx-causal-float32"),
]
# bfloat16 has 8 bits; the numbers of the two modes are rounded from float32 ones that differ in the last bits.
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02}


def planes(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=(*shape, HEAD_DIM)), jnp.float32)


def attention(kind, is_causal, dtype):
    """Returns a function of one array (B, T, N, H), which is query, key and value; for layers (B, T, features)."""
    if kind == "linen":
        layer = elsaa_jax.ELSAA(HEADS, dtype=dtype, config=CONFIG, is_causal=is_causal)
        variables = layer.init(jax.random.key(0), jnp.ones((1, LENGTH, HEADS * HEAD_DIM), dtype))
        return lambda x: layer.apply(variables, x)
    if kind == "nnx":
        sizes = HEADS, HEADS * HEAD_DIM
        return elsaa_nnx.ELSAA(*sizes, dtype=dtype, config=CONFIG, is_causal=is_causal, rngs=nnx.Rngs(0))
    mask = jnp.arange(LENGTH)[None, :] < 35
    shared = {"is_causal": is_causal, "key_mask": mask}
    if kind == "sort_lsh_rank":
        more = {"pairing": "rank", "num_neighbors": 1, "min_length": 6}
        return lambda x: elsaa_jax.sort_lsh_attention(x, x, x, planes(4), block_size=4, **more, **shared).out
    if kind.endswith("_kernel"):
        kind, shared["implementation"] = kind.removesuffix("_kernel"), "interpret"
    if kind == "exact":
        return lambda x: elsaa_jax.exact_attention(x, x, x, **shared).out
    if kind == "race":
        return lambda x: elsaa_jax.race_attention(x, x, x, planes(2, 3), chunk_size=16, **shared).out
    if kind == "sort_lsh":
        return lambda x: elsaa_jax.sort_lsh_attention(x, x, x, planes(4), block_size=8, query_mask=mask, **shared).out
    if kind == "performer":
        return lambda x: elsaa_jax.performer_attention(x, x, x, planes(16), **shared).out
    return lambda x: elsaa_jax.elsaa_attention(x, x, x, race_planes=planes(2, 3), config=CONFIG, **shared)


def run(name):
    """Returns dtypes and numbers of the output and of its gradient, or the error."""
    kind, form, dtype = name.split("-")
    shape = (1, LENGTH, HEADS * HEAD_DIM) if kind in ("linen", "nnx") else (1, LENGTH, HEADS, HEAD_DIM)
    x = jnp.asarray(np.random.default_rng(2).normal(size=shape), dtype)
    try:
        attend = attention(kind, form == "causal", jnp.dtype(dtype))

        def loss(x):
            out = attend(x)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        grad, out = jax.grad(loss, has_aux=True)(x)
    except (TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    dtypes = [out.dtype.name, grad.dtype.name]
    return {"dtypes": dtypes, "numbers": [np.asarray(y, np.float32).ravel().tolist() for y in (out, grad)]}


@pytest.fixture(scope="module")
def with_x64():
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-m", "tests.battery.test_x64"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_dtypes_are_the_same(name, with_x64):
    found, expected = with_x64[name], run(name)
    assert "error" not in found, found["error"]
    dtype = name.split("-")[2]
    assert found["dtypes"] == expected["dtypes"] == [dtype, dtype]
    for x, y in zip(found["numbers"], expected["numbers"], strict=True):
        scale = max(1.0, np.abs(y).max())
        np.testing.assert_allclose(np.asarray(x) / scale, np.asarray(y) / scale, atol=TOLERANCES[dtype])


def refusal_of(kind):
    """Returns the error of float64 inputs."""
    shape = (1, LENGTH, HEADS * HEAD_DIM) if kind in ("linen", "nnx") else (1, LENGTH, HEADS, HEAD_DIM)
    x = jnp.ones(shape, jnp.float64)
    try:
        attention(kind, False, jnp.dtype("float64"))(x)
    except ValueError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("kind", [*FUNCTIONS, "linen", "nnx"])
def test_float64_is_refused(kind, with_x64):
    assert "has dtype float64; it must be one of float32, bfloat16, float16" in with_x64[f"float64-{kind}"]


def main():
    """Prints the results of all calls as JSON; the tests run it with JAX_ENABLE_X64=1."""
    assert jax.config.jax_enable_x64
    results = {name: run(name) for name in NAMES}
    results |= {f"float64-{kind}": refusal_of(kind) for kind in (*FUNCTIONS, "linen", "nnx")}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
