"""A strict set-up: two CPU devices, no silent broadcasting of ranks, no silent promotion of dtypes.

Most of the time of the tests is compilation, so LLVM does the least it can. Where bits or transforms are compared, a
test compiles as users do, by `tests.cases.optimized`.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=2"
    " --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
