"""Memory grows linearly with the length, forward and backward; 262,144 tokens fit."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import elsaa_jax
from elsaa_jax import ElsaaConfig, SortLshConfig

CONFIGS = {
    False: ElsaaConfig(),
    True: ElsaaConfig(sparse=SortLshConfig(num_bits=12, block_size=64, min_length=256)),
}


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("derivative", [False, True], ids=["forward", "backward"])
def test_temporary_memory_is_linear(derivative, is_causal):
    planes = elsaa_jax.sample_planes(jax.random.key(0), (4, 4, 64))

    def attend(*arrays):
        return elsaa_jax.elsaa_attention(*arrays, race_planes=planes, config=CONFIGS[is_causal], is_causal=is_causal)

    function = jax.grad(lambda *a: attend(*a).sum(), argnums=(0, 1, 2)) if derivative else attend

    def temporary_bytes(length):
        arrays = [jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32)] * 3
        return jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(16_384), temporary_bytes(65_536)
    print(f"\n{short / 2**20:.0f} MiB at 16,384 tokens, {long / 2**20:.0f} MiB at 65,536")
    assert long <= 4.3 * short, (short, long)
    # And it is a small multiple of q, k and v: scores of 64 keys a query alone would be one.
    assert long <= (8 if derivative else 5) * 3 * 65_536 * 4 * 64 * 4


FORWARD_262144 = """
import resource, jax, elsaa_jax
from elsaa_jax import ElsaaConfig, SortLshConfig
planes = elsaa_jax.sample_planes(jax.random.key(0), (4, 4, 64))
arrays = [jax.random.normal(jax.random.key(i), (1, 262_144, 4, 64)) for i in range(3)]
for is_causal, config in ((False, ElsaaConfig()), (True, ElsaaConfig(sparse=SortLshConfig(12, 64, 256)))):
    run = jax.jit(lambda *a: elsaa_jax.elsaa_attention(*a, race_planes=planes, config=config, is_causal=is_causal))
    jax.block_until_ready(run(*arrays))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_forward_of_262144_tokens_fits_in_8_gib():
    environment = os.environ | {"XLA_FLAGS": ""}
    command = [sys.executable, "-c", FORWARD_262144]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    gib = int(run.stdout.split()[-1]) / 2**20
    print(f"\n262,144 tokens, forward, causal and not: peak {gib:.2f} GiB of the process")
    assert gib < 8
