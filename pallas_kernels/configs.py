"""Tiles, warps and stages of every kernel, and the calls that the kernels refuse.

One table holds them, by kernel, dtype, head dimension and compute capability. Each entry compiles without spilled
registers and with tensor cores; `python -m pallas_kernels.check --all` shows it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax

MAX_ELEMENTS = 2**31 - 1
MIN_TILE = 16
# Limits of the RACE kernels: soft buckets of one ensemble, and head dimension. More does not fit into registers.
MAX_FEATURES = 64
MAX_RACE_HEAD_DIM = 64
TARGETS = (80, 90, 100, 120)
# Used without a local GPU and outside `use_target`. Its tiles need the least shared memory, so they fit everywhere.
DEFAULT_TARGET = 120

Arithmetic: TypeAlias = Literal["gpu", "float32", "tf32"]
Launcher: TypeAlias = Literal["pallas", "jax-triton"]
BlockKernelName: TypeAlias = Literal["block_forward", "block_backward_query", "block_backward_key"]
RaceKernelName: TypeAlias = Literal["race_summary", "race_readout", "race_backward_query", "race_backward_key"]
KernelName: TypeAlias = BlockKernelName | RaceKernelName
# The readout has another name in a compiled program if it holds the fusion.
CompiledName: TypeAlias = KernelName | Literal["race_fused_readout"]
DTypeName: TypeAlias = Literal["bfloat16", "float32"]

BLOCK_KERNELS: tuple[BlockKernelName, ...] = get_args(BlockKernelName)
RACE_KERNELS: tuple[RaceKernelName, ...] = get_args(RaceKernelName)
KERNELS: tuple[KernelName, ...] = (*BLOCK_KERNELS, *RACE_KERNELS)
HEAD_DIMS = (16, 32, 64, 128)
DTYPES: tuple[DTypeName, ...] = get_args(DTypeName)


class Settings(NamedTuple):
    """Tile sizes and compiler options of one kernel.

    Attributes:
      query_tile: Number of queries that a program handles at once.
      key_tile: Number of keys that a program handles at once.
      num_warps: Number of warps of a program, of 32 threads each.
      num_stages: Number of loop steps that the compiler overlaps.
      arithmetic: "gpu" compiles the kernel. "float32" runs it in the interpreter with exact float32 dots. "tf32" runs
        it in the interpreter and rounds the float32 factors of dots as a GPU does.
      launcher: "jax-triton" launches the kernels that `triton_route` has by jax-triton. Pallas launches all others.
    """

    query_tile: int
    key_tile: int
    num_warps: int
    num_stages: int
    arithmetic: Arithmetic = "gpu"
    launcher: Launcher = "pallas"


# (query tile, key tile, warps, stages) on sm_80, sm_90, sm_100 and sm_120.
_TABLE: dict[tuple[KernelName, str, int], tuple[tuple[int, int, int, int], ...]] = {
    ("block_forward", "bfloat16", 16): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("block_forward", "bfloat16", 32): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    ("block_forward", "bfloat16", 64): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("block_forward", "bfloat16", 128): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2)),
    ("block_forward", "float32", 16): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("block_forward", "float32", 32): ((64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("block_forward", "float32", 64): ((64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    ("block_forward", "float32", 128): ((64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
    ("block_backward_query", "bfloat16", 16): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("block_backward_query", "bfloat16", 32): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("block_backward_query", "bfloat16", 64): ((64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    ("block_backward_query", "bfloat16", 128): ((64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2)),
    ("block_backward_query", "float32", 16): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("block_backward_query", "float32", 32): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2)),
    ("block_backward_query", "float32", 64): ((64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2)),
    ("block_backward_query", "float32", 128): ((64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
    ("block_backward_key", "bfloat16", 16): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("block_backward_key", "bfloat16", 32): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2)),
    ("block_backward_key", "bfloat16", 64): ((64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2)),
    ("block_backward_key", "bfloat16", 128): ((64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), (32, 32, 4, 2)),
    ("block_backward_key", "float32", 16): ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    ("block_backward_key", "float32", 32): ((32, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2)),
    ("block_backward_key", "float32", 64): ((64, 32, 4, 2), (64, 64, 8, 2), (64, 64, 4, 2), (32, 32, 4, 2)),
    ("block_backward_key", "float32", 128): ((32, 32, 4, 2), (32, 32, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
    ("race_summary", "bfloat16", 16): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("race_summary", "bfloat16", 32): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("race_summary", "bfloat16", 64): ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    ("race_summary", "float32", 16): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("race_summary", "float32", 32): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("race_summary", "float32", 64): ((16, 16, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
    ("race_readout", "bfloat16", 16): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("race_readout", "bfloat16", 32): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("race_readout", "bfloat16", 64): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("race_readout", "float32", 16): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("race_readout", "float32", 32): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 4, 1)),
    ("race_readout", "float32", 64): ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ("race_backward_query", "bfloat16", 16): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_query", "bfloat16", 32): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_query", "bfloat16", 64): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_query", "float32", 16): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_query", "float32", 32): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_query", "float32", 64): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_key", "bfloat16", 16): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_key", "bfloat16", 32): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_key", "bfloat16", 64): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_key", "float32", 16): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_key", "float32", 32): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("race_backward_key", "float32", 64): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}  # fmt: skip

_round_tf32 = contextvars.ContextVar("round_tf32", default=False)
_launcher: contextvars.ContextVar[Launcher] = contextvars.ContextVar("launcher", default="pallas")
_target: contextvars.ContextVar[int | None] = contextvars.ContextVar("target", default=None)


def settings_of(kernel: KernelName, dtype: str, head_dim: int, target: int) -> Settings:
    """Returns the settings of a kernel from the table.

    Args:
      kernel: Name of the kernel, one of `KERNELS`.
      dtype: Name of the dtype of q, k and v, one of `DTYPES`. A plain `str`, because it comes from an array.
      head_dim: Head dimension, one of `HEAD_DIMS`.
      target: Compute capability, one of `TARGETS`: 90 for sm_90.
    """
    return Settings(*_TABLE[kernel, dtype, head_dim][TARGETS.index(target)])


def settings_for(kernel: KernelName, x: jax.Array, target: int, arithmetic: Arithmetic, launcher: Launcher) -> Settings:
    """Returns the settings of a kernel for arrays (..., H) like `x`.

    Args:
      kernel: Name of the kernel.
      x: Queries, keys or values.
      target: Compute capability, one of `TARGETS`.
      arithmetic: "gpu", or the arithmetic of the interpreter.
      launcher: Launcher of the kernel.
    """
    settings = settings_of(kernel, x.dtype.name, x.shape[-1], target)
    return settings._replace(arithmetic=arithmetic, launcher=launcher)


def fit(size: int, length: int) -> int:
    """Returns the tile size for `length` rows: `size`, or a smaller power of two if that is enough, but at least 16."""
    return min(size, max(MIN_TILE, 1 << (length - 1).bit_length()))


def local_target() -> int:
    """Returns the target of `use_target`, else that of the local GPU, else `DEFAULT_TARGET`."""
    named = _target.get()
    if named is not None:
        return named
    if jax.default_backend() != "gpu":
        return DEFAULT_TARGET
    major, minor = jax.local_devices()[0].compute_capability.split(".")
    capability = int(major) * 10 + int(minor)
    return max((target for target in TARGETS if target <= capability), default=TARGETS[0])


@contextlib.contextmanager
def use_target(target: int) -> Iterator[None]:
    """Traces programs in this context with the tiles of `target`, whatever the local GPU is.

    Args:
      target: Compute capability, one of `TARGETS`: 90 for sm_90.
    """
    if target not in TARGETS:
        raise ValueError(f"target is {target}; it must be one of {TARGETS}")
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def interpreter_arithmetic() -> Arithmetic:
    """Returns the arithmetic of the interpreter: "tf32" inside `emulate_tf32`, else "float32"."""
    return "tf32" if _round_tf32.get() else "float32"


@contextlib.contextmanager
def emulate_tf32() -> Iterator[None]:
    """Makes the interpreter round the float32 factors of dots to TF32 in this context, as a GPU does."""
    token = _round_tf32.set(True)
    try:
        yield
    finally:
        _round_tf32.reset(token)


def launcher() -> Launcher:
    """Returns the launcher of block attention forward: "jax-triton" inside `use_jax_triton`, else "pallas"."""
    return _launcher.get()


@contextlib.contextmanager
def use_jax_triton() -> Iterator[None]:
    """Traces block attention forward in this context as a Triton kernel that jax-triton launches."""
    token = _launcher.set("jax-triton")
    try:
        yield
    finally:
        _launcher.reset(token)


@functools.cache
def backend_is_there() -> bool:
    """Returns whether this JAX has Pallas's Triton backend, which is deprecated since JAX 0.11."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def block_refusal(query: jax.Array, key: jax.Array) -> str | None:
    """Returns why the block attention kernels cannot take these arrays (..., H), or None if they can."""
    head_dim, dtype = query.shape[-1], query.dtype.name
    if not backend_is_there():
        return f"jax {jax.__version__} has no Triton backend of Pallas"
    if dtype not in DTYPES:
        return f"the kernels take {' and '.join(DTYPES)}, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"the kernels take head dimensions {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    elements = max(query.size, key.size)
    if elements > MAX_ELEMENTS:
        return f"the kernels take arrays of at most {MAX_ELEMENTS} elements, not {elements}: split the batch"
    return None


def race_refusal(
    query: jax.Array, key: jax.Array, num_tables: int, num_bits: int, causal_chunk: int | None
) -> str | None:
    """Returns why the RACE kernels cannot take these arrays (..., H) and hash tables, or None if they can."""
    features, head_dim = num_tables << num_bits, query.shape[-1]
    if head_dim > MAX_RACE_HEAD_DIM:
        return f"the RACE kernels take head dimensions up to {MAX_RACE_HEAD_DIM}, not {head_dim}: registers would spill"
    if features > MAX_FEATURES:
        return f"the RACE kernels take at most {MAX_FEATURES} buckets (tables x 2**bits) of an ensemble, not {features}"
    batch, num_keys, num_kv_heads, _ = key.shape
    summaries = -(-num_keys // (causal_chunk or num_keys)) * batch * num_kv_heads * MAX_FEATURES * head_dim
    if summaries > MAX_ELEMENTS:
        return f"summaries of chunks of {causal_chunk} tokens have {summaries} elements, more than {MAX_ELEMENTS}"
    return block_refusal(query, key)
