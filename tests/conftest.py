"""A strict set-up: two CPU devices, no silent broadcasting of ranks, no silent promotion of dtypes."""

import os
import pathlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

MAPS = pathlib.Path("/proc/self/maps")
MANY_MAPS = 20_000


@pytest.fixture(autouse=True)
def free_compiled_programs():
    """Each compiled program holds memory maps, of which Linux allows a process 65,530 by default: stay well below."""
    yield
    if MAPS.exists() and MAPS.read_text().count("\n") > MANY_MAPS:
        jax.clear_caches()
