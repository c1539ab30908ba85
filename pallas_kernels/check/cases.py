"""The kernel calls that are compiled: every kernel, in each form in which the library calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import block_attention, race, race_backward
from pallas_kernels.configs import (
    BLOCK_KERNELS,
    KERNELS,
    MAX_RACE_HEAD_DIM,
    RACE_KERNELS,
    Launcher,
    Settings,
    fit,
    settings_of,
)
from pallas_kernels.fusion import Sparse
from pallas_kernels.soft_codes import Tables

LENGTH = 4096
HEADS, KV_HEADS = 4, 2
TABLES = Tables(num_tables=4, num_bits=4)
BLOCK_FORMS = ("one", "stretch", "level")
RACE_FORMS = ("full", "causal")
# Of what differs where the fusion is in the readout.
FUSED_FORMS = ("full fused", "causal fused")
# What CI compiles.
HARDEST_FORMS = ("level", "causal", "causal fused")


class KernelCase(NamedTuple):
    """One kernel as it is compiled.

    Attributes:
      kernel: its name.
      dtype: of q, k and v.
      head_dim: H.
      block: keys of a block, or tokens of a chunk.
      form: of block attention "one" (not causal), "stretch" (the causal base) or "level" (added to what is
        there); of RACE "full" or "causal", and the same with the fusion in it.
    """

    kernel: str
    dtype: str
    head_dim: int
    block: int
    form: str


def all_cases(whole: bool) -> Iterator[KernelCase]:
    """The whole matrix of what is not refused, or the part of it that CI compiles."""
    for kernel in KERNELS:
        forms: tuple[str, ...] = BLOCK_FORMS if kernel in BLOCK_KERNELS else RACE_FORMS
        if kernel in ("race_readout", "race_backward_query"):
            forms = (*forms, *FUSED_FORMS)
        for dtype in ("bfloat16", "float32"):
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
    """The call of a case, and its arguments as shapes."""
    settings = settings_of(case.kernel, case.dtype, case.head_dim, target)._replace(launcher=launcher)

    def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    make = _block_call if case.kernel in BLOCK_KERNELS else _race_call
    return make(case, settings, shape)


def _block_call(case: KernelCase, settings: Settings, shape: Callable) -> tuple[Callable, tuple[Any, ...]]:
    queries, keys = LENGTH * HEADS, LENGTH * KV_HEADS
    query_tile, key_tile = (fit(size, case.block) for size in (settings.query_tile, settings.key_tile))
    tiles, blocks = queries // query_tile, keys // key_tile
    sizes = (tiles, query_tile), (blocks, key_tile), (tiles,), (tiles,), (blocks,), (blocks,)
    plan = block_attention.Plan(*(shape(*size, dtype=jnp.int32) for size in sizes))
    causal = block_attention.Causal(LENGTH, LENGTH, HEADS, KV_HEADS) if case.form == "stretch" else None
    geometry = block_attention.Geometry(case.head_dim**-0.5, causal)
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
