"""The kernel calls that the check compiles: every kernel, in each form in which the library calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import block_attention, race, race_backward
from pallas_kernels.configs import (
    BLOCK_KERNELS,
    DTYPES,
    KERNELS,
    MAX_RACE_HEAD_DIM,
    RACE_KERNELS,
    DTypeName,
    KernelName,
    Launcher,
    Settings,
    fit,
    settings_of,
)
from pallas_kernels.fusion import Sparse
from pallas_kernels.plan import Causal, Geometry, Plan
from pallas_kernels.soft_codes import Tables

LENGTH = 4096
HEADS, KV_HEADS = 4, 2
TABLES = Tables(num_tables=4, num_bits=4)

BlockForm: TypeAlias = Literal["one", "stretch", "level"]
RaceForm: TypeAlias = Literal["full", "causal"]
FusedForm: TypeAlias = Literal["full fused", "causal fused"]
Form: TypeAlias = BlockForm | RaceForm | FusedForm
BLOCK_FORMS: tuple[BlockForm, ...] = get_args(BlockForm)
RACE_FORMS: tuple[RaceForm, ...] = get_args(RaceForm)
# The kernels that change if the readout holds the fusion have these forms too.
FUSED_FORMS: tuple[FusedForm, ...] = get_args(FusedForm)
# CI compiles these forms. They need the most registers.
HARDEST_FORMS: tuple[Form, ...] = ("level", "causal", "causal fused")


class KernelCase(NamedTuple):
    """A kernel call to compile.

    Attributes:
      kernel: Name of the kernel.
      dtype: Dtype of q, k and v.
      head_dim: Head dimension, H.
      block: Number of keys in a block (block attention) or of tokens in a chunk (RACE).
      form: Variant of the call. Block attention: "one" is non-causal, "stretch" is the causal base, "level" adds to
        existing sums. RACE: "full" is non-causal, "causal" is causal, each also with the fusion.
    """

    kernel: KernelName
    dtype: DTypeName
    head_dim: int
    block: int
    form: Form


def all_cases(whole: bool) -> Iterator[KernelCase]:
    """Yields all kernel calls to compile, or the part that CI compiles.

    Args:
      whole: Whether to yield all dtypes, head dimensions, block sizes and forms that the kernels accept.
    """
    for kernel in KERNELS:
        forms: tuple[Form, ...] = BLOCK_FORMS if kernel in BLOCK_KERNELS else RACE_FORMS
        if kernel in ("race_readout", "race_backward_query"):
            forms = (*forms, *FUSED_FORMS)
        for dtype in DTYPES:
            for head_dim in (32, 64, 128) if whole else (64,):
                if kernel in RACE_KERNELS and head_dim > MAX_RACE_HEAD_DIM:
                    continue
                for block in (64, 128, 256) if whole else (128,):
                    for form in forms:
                        if whole or form in HARDEST_FORMS:
                            yield KernelCase(kernel, dtype, head_dim, block, form)


def build(
    case: KernelCase, target: int, sharding: Any, launcher: Launcher = "pallas"
) -> tuple[Callable, tuple[Any, ...]]:
    """Returns the function that calls the kernel of a case, and the shapes of its arguments."""
    settings = settings_of(case.kernel, case.dtype, case.head_dim, target)._replace(launcher=launcher)

    def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    make = _block_call if case.kernel in BLOCK_KERNELS else _race_call
    return make(case, settings, shape)


def _block_call(case: KernelCase, settings: Settings, shape: Callable) -> tuple[Callable, tuple[Any, ...]]:
    """Returns a call of a block attention kernel."""
    queries, keys = LENGTH * HEADS, LENGTH * KV_HEADS
    query_tile, key_tile = (fit(size, case.block) for size in (settings.query_tile, settings.key_tile))
    tiles, blocks = queries // query_tile, keys // key_tile
    sizes = (tiles, query_tile), (blocks, key_tile), (tiles,), (tiles,), (blocks,), (blocks,)
    plan = Plan(*(shape(*size, dtype=jnp.int32) for size in sizes))
    causal = Causal(LENGTH, LENGTH, HEADS, KV_HEADS) if case.form == "stretch" else None
    geometry = Geometry(case.head_dim**-0.5, causal)
    query, key = (shape(n, case.head_dim, dtype=jnp.dtype(case.dtype)) for n in (queries, keys))
    numbers = shape(queries)
    dtype = jnp.dtype(case.dtype) if case.form == "one" else jnp.dtype(jnp.float32)
    adds = case.form == "level"
    sums = [shape(n, case.head_dim) for n in (queries, keys)]
    rows = query, key, key
    if case.kernel == "block_forward":
        function: Callable = block_attention.forward
        arguments: tuple[Any, ...] = (plan, *rows, (sums[0], numbers) if adds else None)
    elif case.kernel == "block_backward_query":
        function = block_attention.backward_query
        arguments = plan, *rows, numbers, query, numbers, sums[0] if adds else None
    else:
        function = block_attention.backward_key
        arguments = plan, *rows, numbers, query, numbers, (sums[1], sums[1]) if adds else None
    return lambda *arrays: function(*arrays, dtype, geometry, settings), arguments


def _race_call(case: KernelCase, settings: Settings, shape: Callable) -> tuple[Callable, tuple[Any, ...]]:
    """Returns a call of a RACE kernel."""
    causal, fused = case.form.startswith("causal"), case.form.endswith("fused")
    sizes = 1, LENGTH, LENGTH, HEADS, KV_HEADS
    geometry = race.Geometry(*sizes, TABLES, case.block, causal, masked=True, shared_planes=False)
    dtype, features = jnp.dtype(case.dtype), TABLES.num_features
    query, key = (shape(LENGTH * n, case.head_dim, dtype=dtype) for n in (HEADS, KV_HEADS))
    planes = shape(KV_HEADS, TABLES.num_planes, case.head_dim)
    inputs = race.Inputs(key, key, planes, shape(2), shape(LENGTH, dtype=jnp.int8))
    chunks = geometry.num_chunks if causal else 1
    state = shape(chunks, KV_HEADS, features), shape(chunks, KV_HEADS, features, case.head_dim)
    numbers = shape(LENGTH * HEADS)
    if case.kernel == "race_summary":
        return lambda *arrays: race.summary(*arrays, geometry, settings), (inputs,)
    if case.kernel == "race_readout":
        sparse = Sparse(query, numbers, numbers, numbers, numbers) if fused else None
        return lambda *a: race.readout(*a[:-1], dtype, geometry, settings, a[-1]), (inputs, query, *state, sparse)
    if case.kernel == "race_backward_query":
        arguments: tuple[Any, ...] = (inputs, query, *state, query, numbers, numbers if fused else None)
        return lambda *a: race_backward.backward_query(*a[:-1], geometry, settings, a[-1]), arguments
    arguments = inputs, query, *state, query, numbers, numbers
    return lambda *arrays: race_backward.backward_key(*arrays, geometry, settings), arguments
