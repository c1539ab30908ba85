"""Block attention forward as a Triton kernel that jax-triton launches, an alternative to Pallas's Triton backend.

`block_attention.forward` calls this module if its settings say "jax-triton". The plan, the settings and the results are
the same. The module needs triton and jax-triton, so it is imported only when it is used. With the arithmetic of an
interpreter, Triton's own interpreter runs the kernel; set `TRITON_INTERPRET=1` before triton is imported.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from pallas_kernels.configs import Settings, local_target
from pallas_kernels.launch import Array, DType
from pallas_kernels.plan import Geometry, Plan


def forward(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    start: tuple[Array, Array] | None,
    dtype: DType,
    geometry: Geometry,
    settings: Settings,
) -> tuple[Array, Array]:
    """Computes the output (B*T*N, H) and the log-sum-exp (B*T*N,). `block_attention.forward` explains the arguments."""
    shapes = jax.ShapeDtypeStruct(query.shape, dtype), jax.ShapeDtypeStruct(query.shape[:1], jnp.float32)
    causal = geometry.causal or (1, 1, 1, 1)
    constants = {
        "num_query_rows": query.shape[0],
        "num_key_rows": key.shape[0],
        "head_dim": query.shape[1],
        "query_tile": plan.query_rows.shape[1],
        "key_tile": plan.key_rows.shape[1],
        "scale": geometry.scale,
        "merges": start is not None,
        "is_causal": geometry.causal is not None,
        **dict(zip(("num_queries", "num_keys", "num_heads", "num_kv_heads"), causal, strict=True)),
        "widens": settings.arithmetic != "gpu",
    }
    arrays = plan.query_rows, plan.key_rows, plan.first_block, plan.end_block, query, key, value
    # The kernel has a fixed number of arguments. Without `start` it does not read these two.
    starts = start or (0, 0)
    grid = (len(plan.query_rows),)
    if settings.arithmetic != "gpu":
        interpret = functools.partial(_interpret, shapes=shapes, grid=grid, constants=constants)
        return jax.pure_callback(interpret, shapes, *arrays, *starts)
    import jax_triton

    out, log_mass = jax_triton.triton_call(
        *arrays,
        *starts,
        kernel=_forward_kernel,
        out_shape=shapes,
        grid=grid,
        name="block_forward",
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
        compute_capability=None if jax.default_backend() == "gpu" else local_target(),
        input_output_aliases={} if start is None else {7: 0, 8: 1},
        **constants,
    )
    return out, log_mass


@triton.jit
def _forward_kernel(
    query_rows_ptr: tl.tensor,
    key_rows_ptr: tl.tensor,
    first_ptr: tl.tensor,
    end_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    start_out_ptr: tl.tensor,
    start_mass_ptr: tl.tensor,
    out_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    num_query_rows: tl.constexpr,
    num_key_rows: tl.constexpr,
    head_dim: tl.constexpr,
    query_tile: tl.constexpr,
    key_tile: tl.constexpr,
    scale: tl.constexpr,
    merges: tl.constexpr,
    is_causal: tl.constexpr,
    num_queries: tl.constexpr,
    num_keys: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    widens: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    columns = tl.arange(0, head_dim)[None, :]
    rows = tl.load(query_rows_ptr + tile * query_tile + tl.arange(0, query_tile))
    there = rows < num_query_rows
    places = rows[:, None] * head_dim + columns
    query = tl.load(query_ptr + places, mask=there[:, None], other=0.0)
    # The last key row that a query sees. Padding keys lie behind it.
    last_rows = tl.zeros_like(rows) + (num_key_rows - 1)
    if is_causal:
        batch, head = rows // (num_queries * num_heads), rows % num_heads
        position = rows // num_heads % num_queries + (num_keys - num_queries)
        own = (batch * num_keys + position) * num_kv_heads + head // (num_heads // num_kv_heads)
        last_rows = tl.minimum(own, last_rows)
    if merges:
        out = tl.load(start_out_ptr + places, mask=there[:, None], other=0.0).to(tl.float32)
        top = tl.load(start_mass_ptr + rows, mask=there, other=float("-inf"))
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    else:
        out = tl.zeros([query_tile, head_dim], tl.float32)
        top = tl.full([query_tile], float("-inf"), tl.float32)
        total = tl.zeros([query_tile], tl.float32)
    for block in range(tl.load(first_ptr + tile), tl.load(end_ptr + tile)):
        key_rows = tl.load(key_rows_ptr + block * key_tile + tl.arange(0, key_tile))
        key_places = key_rows[:, None] * head_dim + columns
        key_there = (key_rows < num_key_rows)[:, None]
        key = tl.load(key_ptr + key_places, mask=key_there, other=0.0)
        value = tl.load(value_ptr + key_places, mask=key_there, other=0.0)
        logits = _dot(query, tl.trans(key), widens) * scale
        logits = tl.where(key_rows[None, :] <= last_rows[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(logits - base[:, None])
        keep = tl.exp(top - base)
        out = out * keep[:, None] + _dot(weights.to(value.dtype), value, widens)
        total = total * keep + tl.sum(weights, axis=1)
        top = new_top
    nonzero = tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + places, (out / nonzero[:, None]).to(out_ptr.dtype.element_ty), mask=there[:, None])
    tl.store(mass_ptr + rows, tl.where(total > 0, top + tl.log(nonzero), float("-inf")), mask=there)


@triton.jit
def _dot(x: tl.tensor, y: tl.tensor, widens: tl.constexpr) -> tl.tensor:
    # Triton's interpreter cannot multiply bfloat16, so it widens the factors to float32.
    if widens:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y)


class _HostArray:
    """A NumPy array with the interface of a tensor in CPU memory, as Triton's interpreter expects it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = {"float32": "fp32", "bfloat16": "bf16", "int32": "i32"}[array.dtype.name]

    def data_ptr(self) -> int:
        """Returns the address of the first element."""
        return self.array.ctypes.data

    def untyped_storage(self, *_: Any, **__: Any) -> "_HostArray":
        """Returns the array unchanged. The interpreter uses the result only as a tensor with the same data."""
        return self

    cpu = new_empty = set_ = size = stride = storage_offset = copy_ = untyped_storage


def _interpret(
    *arrays: Any, shapes: tuple[jax.ShapeDtypeStruct, ...], grid: tuple[int], constants: dict[str, Any]
) -> tuple[np.ndarray, ...]:
    """Runs the kernel on Triton's interpreter. Rows that it does not write keep the values of `start`, or are NaN."""
    arrays = tuple(np.asarray(x) for x in arrays)
    if constants["merges"]:
        outputs = tuple(np.array(x) for x in arrays[-2:])
    else:
        outputs = tuple(np.full(shape.shape, np.nan, shape.dtype) for shape in shapes)
    pointers = (_HostArray(x) if x.ndim else int(x) for x in (*arrays, *outputs))
    _forward_kernel[grid](*pointers, **constants)
    return outputs
