"""How kernels are called, and what they share: rows by index, and dots with float32 sums.

A row past the end of an array is no row: it reads as a fill value and is never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.configs import Settings

Array = jax.Array
DType = Any
Ref = Any


def call(
    kernel: Any,
    name: str,
    settings: Settings,
    grid: tuple[int, ...],
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[Array],
    *,
    aliases: dict[int, int] | None = None,
) -> list[Array]:
    """Runs `kernel` over `grid`, on whole arrays: kernels find their part by `pl.program_id`.

    Args:
      kernel: takes a reference for each of `arrays`, then for each output.
      name: what the compiled kernel is called.
      settings: warps, stages and arithmetic; without warps and stages JAX would
        take another backend.
      grid: programs; those of the first axis may be 2**31 - 1, of others 65,535.
      out_shapes: of the outputs.
      arrays: inputs.
      aliases: input -> output that takes its memory and starts with its values.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=list(out_shapes),
        input_output_aliases=aliases or {},
        compiler_params=_triton().CompilerParams(num_warps=settings.num_warps, num_stages=settings.num_stages),
        interpret=settings.arithmetic != "gpu",
        name=name,
    )(*arrays)


def take(ref: Ref, rows: Array) -> Array:
    """Rows (t, H) of an array (rows, H); 0 where there is no row."""
    index, present = _places(ref, rows)
    return _triton().load(ref.at[index], mask=present, other=jnp.zeros((), ref.dtype))


def put(ref: Ref, rows: Array, values: Array) -> None:
    """Writes rows (t, H), in the dtype of the array."""
    index, present = _places(ref, rows)
    _triton().store(ref.at[index], values.astype(ref.dtype), mask=present)


def take_numbers(ref: Ref, rows: Array, fill: float) -> Array:
    """Entries (t,) of an array (rows,); `fill` where there is no row."""
    return _triton().load(ref.at[rows], mask=rows < ref.shape[0], other=jnp.full((), fill, ref.dtype))


def put_numbers(ref: Ref, rows: Array, values: Array) -> None:
    """Writes entries (t,)."""
    _triton().store(ref.at[rows], values, mask=rows < ref.shape[0])


def dot(
    x: Array,
    y: Array,
    *,
    settings: Settings,
    transpose_x: bool = False,
    transpose_y: bool = False,
    precise: bool = False,
) -> Array:
    """x y, or with x^T or y^T, summed in float32.

    On a GPU, float32 factors are rounded to TF32 (10 bits); `precise` adds the products of what
    rounding took away, which keeps about 21 bits.
    """
    precision: Any = None
    if x.dtype == jnp.float32 and precise:
        gpu = settings.arithmetic == "gpu"
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if gpu else lax.Precision.HIGHEST
    elif x.dtype == jnp.float32 and settings.arithmetic == "tf32":
        x, y = (lax.reduce_precision(a, exponent_bits=8, mantissa_bits=10) for a in (x, y))
    contract = (((0 if transpose_x else 1,), (1 if transpose_y else 0,)), ((), ()))
    return lax.dot_general(x, y, contract, precision=precision, preferred_element_type=jnp.float32)


def dot_ones(x: Array, ones: Array, *, settings: Settings) -> Array:
    """x y of float32 x and a y of zeros and ones, to about 21 bits: x is cut into two parts that TF32 holds."""
    if settings.arithmetic != "gpu":
        return dot(x, ones, settings=settings, precise=True)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    head = lax.bitcast_convert_type(bits & jnp.full_like(bits, ~0x1FFF), jnp.float32)
    return dot(head, ones, settings=settings) + dot(x - head, ones, settings=settings)


def div(x: Array, number: int | Array) -> Array:
    """x // number of int32 that are not negative: without the cases that signs would need."""
    return lax.div(x, jnp.full_like(x, number))


def rem(x: Array, number: int | Array) -> Array:
    """x % number of int32 that are not negative."""
    return lax.rem(x, jnp.full_like(x, number))


def _triton() -> Any:
    """Pallas's Triton backend: not imported before a kernel is traced, for it takes time and will be removed."""
    from jax.experimental.pallas import triton

    return triton


def _places(ref: Ref, rows: Array) -> tuple[tuple[Array, Array], Array]:
    shape = (rows.shape[0], ref.shape[1])
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    rows = jnp.broadcast_to(rows[:, None], shape)
    return (rows, columns), rows < ref.shape[0]
