"""Errors of the kernels in JAX's interpreter, measured against the O(N^2) definitions in `elsaa_jax.reference`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

import elsaa_jax
from elsaa_jax import reference
from pallas_kernels.configs import DTypeName, KernelName, emulate_tf32

Function: TypeAlias = Literal["sort_lsh_attention", "race_attention"]
# "float32" and "bfloat16" are dtypes of the inputs; "tf32" is float32 whose dots round as a GPU does.
Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

# The kernel that writes each of (out, log_mass, d_query, d_key, d_value).
KERNELS: dict[Function, tuple[KernelName, ...]] = {
    "sort_lsh_attention": (
        "block_forward", "block_forward", "block_backward_query", "block_backward_key", "block_backward_key",
    ),
    "race_attention": (
        "race_readout", "race_readout", "race_backward_query", "race_backward_key", "race_backward_key",
    ),
}  # fmt: skip
TOLERANCES: dict[Precision, float] = {"float32": 1e-5, "tf32": 1e-2, "bfloat16": 3e-2}


class Error(NamedTuple):
    """The largest error of a kernel's results.

    Attributes:
      kernel: Name of the kernel.
      arithmetic: Precision of the inputs and dots.
      is_causal: Whether attention was causal.
      error: Largest absolute error, divided by the largest absolute value of the array if that is above 1.
    """

    kernel: KernelName
    arithmetic: Precision
    is_causal: bool
    error: float

    @property
    def failure(self) -> str | None:
        """Reason why the error is too large, or None."""
        bound = TOLERANCES[self.arithmetic]
        return None if self.error <= bound else f"error {self.error:.1e} is above the tolerance {bound:.0e}"


def errors(arithmetics: Sequence[Precision] = PRECISIONS) -> Iterator[Error]:
    """Measures the errors of all kernels, causal and non-causal.

    The inputs have 75 tokens, in blocks of 16, and two query heads that share one key/value head.
    """
    for function, kernels in KERNELS.items():
        for is_causal in (False, True):
            for arithmetic in arithmetics:
                found = _results(function, is_causal, arithmetic)
                expected = _results(function, is_causal, arithmetic, by_reference=True)
                worst: dict[KernelName, float] = {}
                for kernel, x, y in zip(kernels, found, expected, strict=True):
                    scale = max(1.0, float(np.abs(y).max()))
                    worst[kernel] = max(worst.get(kernel, 0.0), float(np.abs(x - y).max()) / scale)
                for kernel, error in worst.items():
                    yield Error(kernel, arithmetic, is_causal, error)


def _results(
    function: Function, is_causal: bool, arithmetic: Precision, by_reference: bool = False
) -> list[np.ndarray]:
    """Computes out, log_mass, d_query, d_key and d_value by the kernels, or in float32 by the reference."""
    dtype: DTypeName = "bfloat16" if arithmetic == "bfloat16" else "float32"
    rng = np.random.default_rng(0)
    shapes = (1, 75, 2, 16), (1, 75, 1, 16), (1, 75, 1, 16)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    planes = jnp.asarray(rng.normal(size=(3, 3, 16)) / 2, jnp.float32)
    sparse = function == "sort_lsh_attention"
    options: dict[str, Any] = {"block_size": 16, "min_length": 24 * is_causal} if sparse else {"chunk_size": 32}
    planes = planes[0] if sparse else planes
    if by_reference:
        call, arrays = getattr(reference, function), [x.astype(jnp.float32) for x in arrays]
    else:
        call, options["implementation"] = getattr(elsaa_jax, function), "interpret"

    def loss(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, log_mass = call(*arrays, planes, is_causal=is_causal, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(log_mass)), (out, log_mass)

    with emulate_tf32() if arithmetic == "tf32" and not by_reference else contextlib.nullcontext():
        (_, outputs), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return [np.asarray(x, np.float32) for x in (*outputs, *grads)]
