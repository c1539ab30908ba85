"""How tests compile. Most of their time is compilation, so by default XLA does the least it can.

Where bits, transforms or seconds are compared, a test compiles as users do, by `optimized`.
"""

import importlib.metadata

import pytest

# Option of XLA: (in tests, for users).
OPTIONS = {"xla_backend_optimization_level": (0, 3), "xla_llvm_disable_expensive_passes": (True, False)}
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Newer versions do not know it, and refuse what they do not know.
    OPTIONS["xla_cpu_use_fusion_emitters"] = (False, True)

FLAGS = " ".join(f"--{name}={str(quick).lower()}" for name, (quick, _) in OPTIONS.items())


def optimized(function):
    """`jax.jit` as users have it."""
    import jax  # Reads XLA_FLAGS, which conftest.py sets from FLAGS.

    return jax.jit(function, compiler_options={name: usual for name, (_, usual) in OPTIONS.items()})


# From JAX 0.11 on, lowering a kernel compiles it, which needs the CUDA plugin, and keeps no Triton IR.
TRITON_IR = pytest.mark.skipif(
    not importlib.metadata.version("jaxlib").startswith("0.10."), reason="this JAX keeps no Triton IR in a program"
)
