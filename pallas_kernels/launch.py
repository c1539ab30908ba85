"""The one function that calls a kernel, and the operations that all kernels share: rows by index, and dots.

A row index at or past the end of an array is padding: reading it gives a fill value, writing it does nothing.

A kernel that makes an array from Python numbers alone must state its dtype. With `JAX_ENABLE_X64=1` such an array would
otherwise have 64 bits, and a dot of float32 with float64 does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.configs import CompiledName, Settings

Array: TypeAlias = jax.Array
DType: TypeAlias = Any
# A reference to an array in device memory. Pallas has no public type for it.
Ref: TypeAlias = Any


def call(
    kernel: Callable[..., None],
    name: CompiledName,
    settings: Settings,
    grid: tuple[int, ...],
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[Array],
    *,
    aliases: dict[int, int] | None = None,
) -> list[Array]:
    """Runs `kernel` over `grid`. Each program gets the whole arrays and finds its part by `pl.program_id`.

    Args:
      kernel: Function of one reference for each of `arrays`, followed by one for each output.
      name: Name of the compiled kernel.
      settings: Warps, stages and arithmetic. Warps and stages must be given, because JAX chooses another backend
        without them.
      grid: Number of programs along each axis: at most 2**31 - 1 on the first, 65,535 on the others.
      out_shapes: Shapes and dtypes of the outputs.
      arrays: Inputs.
      aliases: Pairs of input index and output index. Such an output takes the memory of the input and begins with its
        values.

    Returns:
      The outputs.
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
    """Reads rows (t, H) of an array (rows, H). Padding rows read as zeros."""
    index, present = _places(ref, rows)
    return _triton().load(ref.at[index], mask=present, other=jnp.zeros((), ref.dtype))


def put(ref: Ref, rows: Array, values: Array) -> None:
    """Writes rows (t, H) in the dtype of the array. Padding rows are dropped."""
    index, present = _places(ref, rows)
    _triton().store(ref.at[index], values.astype(ref.dtype), mask=present)


def take_numbers(ref: Ref, rows: Array, fill: float) -> Array:
    """Reads entries (t,) of an array (rows,). Padding entries read as `fill`."""
    return _triton().load(ref.at[rows], mask=rows < ref.shape[0], other=jnp.full((), fill, ref.dtype))


def put_numbers(ref: Ref, rows: Array, values: Array) -> None:
    """Writes entries (t,). Padding entries are dropped."""
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
    """Returns the matrix product of x and y, summed in float32. Either factor can be transposed.

    On a GPU, float32 factors are rounded to TF32, which has 10 bits of mantissa. With `precise`, products of the
    rounding errors are added, which keeps about 21 bits.
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
    """Returns the product of float32 x with a matrix of zeros and ones, to about 21 bits.

    On a GPU, x is split into two parts that TF32 represents exactly.
    """
    if settings.arithmetic != "gpu":
        return dot(x, ones, settings=settings, precise=True)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    head = lax.bitcast_convert_type(bits & jnp.full_like(bits, ~0x1FFF), jnp.float32)
    return dot(head, ones, settings=settings) + dot(x - head, ones, settings=settings)


def ones_where(condition: Array) -> Array:
    """Returns float32 ones where the condition holds and zeros elsewhere."""
    return jnp.where(condition, np.float32(1.0), np.float32(0.0))


def div(x: Array, number: int | Array) -> Array:
    """Returns x // number for non-negative int32. `//` would add instructions for negative numbers."""
    return lax.div(x, jnp.full_like(x, number))


def rem(x: Array, number: int | Array) -> Array:
    """Returns x % number for non-negative int32."""
    return lax.rem(x, jnp.full_like(x, number))


def _triton() -> Any:
    """Imports Pallas's Triton backend, when a kernel is traced: the import is slow, and JAX will remove the backend."""
    from jax.experimental.pallas import triton

    return triton


def _places(ref: Ref, rows: Array) -> tuple[tuple[Array, Array], Array]:
    """Returns the index of every element of the given rows, and whether the element exists."""
    shape = (rows.shape[0], ref.shape[1])
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    rows = jnp.broadcast_to(rows[:, None], shape)
    return (rows, columns), rows < ref.shape[0]
