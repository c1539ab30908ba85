"""Errors of the kernels in JAX's interpreter, against the O(N^2) definitions of `elsaa_jax.reference`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import elsaa_jax
from elsaa_jax import reference
from pallas_kernels.configs import emulate_tf32

# What is written by which kernel, in the order of (out, log_mass, d_query, d_key, d_value).
KERNELS = {
    "sort_lsh_attention": ("block_forward", "block_forward", "block_backward_query", "block_backward_key"),
    "race_attention": ("race_readout", "race_readout", "race_backward_query", "race_backward_key"),
}
TOLERANCES = {"float32": 1e-5, "tf32": 1e-2, "bfloat16": 3e-2}


class Error(NamedTuple):
    """The largest error of what a kernel writes, on the scale of the array where that is above 1."""

    kernel: str
    arithmetic: str
    is_causal: bool
    error: float

    @property
    def failure(self) -> str | None:
        """Why it is not good enough."""
        bound = TOLERANCES[self.arithmetic]
        return None if self.error <= bound else f"error {self.error:.1e} above {bound:.0e}"


def errors(arithmetics: tuple[str, ...] = ("float32", "tf32", "bfloat16")) -> Iterator[Error]:
    """The errors of all kernels, causal and not; 75 tokens in blocks of 16, two heads on one key/value head."""
    for function, kernels in KERNELS.items():
        for is_causal in (False, True):
            for arithmetic in arithmetics:
                dtype = jnp.bfloat16 if arithmetic == "bfloat16" else jnp.float32
                found, expected = (_results(function, is_causal, arithmetic, dtype, name) for name in ("fast", "slow"))
                worst: dict[str, float] = {}
                for kernel, x, y in zip((*kernels, kernels[-1]), found, expected, strict=True):
                    scale = max(1.0, float(np.abs(y).max()))
                    worst[kernel] = max(worst.get(kernel, 0.0), float(np.abs(x - y).max()) / scale)
                for kernel, error in worst.items():
                    yield Error(kernel, arithmetic, is_causal, error)


def _results(function: str, is_causal: bool, arithmetic: str, dtype: Any, side: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (1, 75, 2, 16), (1, 75, 1, 16), (1, 75, 1, 16)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    planes = jnp.asarray(rng.normal(size=(3, 3, 16)) / 2, jnp.float32)
    sparse = function == "sort_lsh_attention"
    options: dict[str, Any] = {"block_size": 16, "min_length": 24 * is_causal} if sparse else {"chunk_size": 32}
    planes = planes[0] if sparse else planes
    if side == "fast":
        call, options["implementation"] = getattr(elsaa_jax, function), "interpret"
    else:
        call, arrays = getattr(reference, function), [x.astype(jnp.float32) for x in arrays]

    def loss(*arrays):
        out, log_mass = call(*arrays, planes, is_causal=is_causal, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(log_mass)), (out, log_mass)

    with emulate_tf32() if arithmetic == "tf32" and side == "fast" else contextlib.nullcontext():
        (_, outputs), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return [np.asarray(x, np.float32) for x in (*outputs, *grads)]
