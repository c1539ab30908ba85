"""Tiles, warps and stages of every kernel, and what the kernels refuse.

The one table by kernel, dtype, head dimension and compute capability. Each entry compiles without
spilled registers and with tensor cores: `python -m pallas_kernels.check --all` shows it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import jax

MAX_ELEMENTS = 2**31 - 1
MIN_TILE = 16
# Soft buckets of one ensemble, and head dimension, of RACE: more do not fit into registers.
MAX_FEATURES = 64
MAX_RACE_HEAD_DIM = 64
TARGETS = (80, 90, 100, 120)
# Where no GPU is at hand, and none was named: the tiles that need the least shared memory.
DEFAULT_TARGET = 120


Arithmetic: TypeAlias = Literal["gpu", "float32", "tf32"]
Launcher: TypeAlias = Literal["pallas", "jax-triton"]


class Settings(NamedTuple):
    """How one kernel is cut and compiled.

    Attributes:
      query_tile: queries of a program, or of a step of its loop.
      key_tile: keys of a program, or of a step of its loop.
      num_warps: of 32 threads.
      num_stages: how many steps of a loop are in flight.
      arithmetic: "gpu" compiles; "float32" runs in the interpreter, where dots of float32 factors
        are exact; "tf32" too, with those factors rounded as a GPU does.
      launcher: "jax-triton" launches the kernels that `triton_route` has, and Pallas the others.
    """

    query_tile: int
    key_tile: int
    num_warps: int
    num_stages: int
    arithmetic: Arithmetic = "gpu"
    launcher: Launcher = "pallas"


BLOCK_KERNELS = ("block_forward", "block_backward_query", "block_backward_key")
RACE_KERNELS = ("race_summary", "race_readout", "race_backward_query", "race_backward_key")
KERNELS = (*BLOCK_KERNELS, *RACE_KERNELS)
HEAD_DIMS = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float32")

# (query tile, key tile, warps, stages) on sm_80, sm_90, sm_100 and sm_120.
_TABLE = {
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


def settings_of(kernel: str, dtype: str, head_dim: int, target: int) -> Settings:
    """The entry of the table.

    Args:
      kernel: one of `KERNELS`.
      dtype: one of `DTYPES`, that of q, k and v.
      head_dim: one of `HEAD_DIMS`.
      target: one of `TARGETS`.
    """
    return Settings(*_TABLE[kernel, dtype, head_dim][TARGETS.index(target)])


def fit(size: int, length: int) -> int:
    """A tile of `size`, or smaller where there are fewer rows: a power of two, at least 16."""
    return min(size, max(MIN_TILE, 1 << (length - 1).bit_length()))


def local_target() -> int:
    """The target that was named by `use_target`, or that of the local GPU, or `DEFAULT_TARGET`."""
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
    """Within it, programs are traced with the tiles of `target`, whatever GPU is at hand."""
    if target not in TARGETS:
        raise ValueError(f"target is {target}; it must be one of {TARGETS}")
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def interpreter_arithmetic() -> Arithmetic:
    """How the interpreter computes: in float32, or as `emulate_tf32` says."""
    return "tf32" if _round_tf32.get() else "float32"


@contextlib.contextmanager
def emulate_tf32() -> Iterator[None]:
    """Within it, the interpreter rounds the float32 factors of dots to TF32, as a GPU does."""
    token = _round_tf32.set(True)
    try:
        yield
    finally:
        _round_tf32.reset(token)


def launcher() -> Launcher:
    """Who launches the kernels that both can: Pallas, or what `use_jax_triton` says."""
    return _launcher.get()


@contextlib.contextmanager
def use_jax_triton() -> Iterator[None]:
    """Within it, the forward pass of block attention is traced as a Triton kernel that jax-triton launches."""
    token = _launcher.set("jax-triton")
    try:
        yield
    finally:
        _launcher.reset(token)


@functools.cache
def backend_is_there() -> bool:
    """Whether this JAX has Pallas's Triton backend, which is deprecated from 0.11 on."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def block_refusal(query: jax.Array, key: jax.Array) -> str | None:
    """Why block attention cannot take arrays (..., H) like these; None: it can."""
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
    """Why the RACE kernels cannot take arrays (..., H) like these and such tables; None: they can."""
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
