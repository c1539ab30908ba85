"""A strict set-up: two CPU devices, no silent change of ranks or dtypes; and quick compilation."""

import os

from tests.compilation import FLAGS

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2 {FLAGS}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

assert jax.device_count() == 2  # Starts the backend, before a test can change the flags that it reads.


@pytest.fixture(autouse=True, scope="session")
def _own_data_sets():
    """Small data sets of tests never lie among those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ELSAA_DATA_DIR", "ELSAA_PREPARED_DIR"):
            patch.delenv(name, raising=False)
        yield
