"""RACE forward: chunks of keys are summarised into soft buckets, and queries read from the summaries.

One ensemble of hash tables a call. Soft codes are computed in the kernel and never written. A
program of the summary owns the buckets of one chunk, one of the readout owns a tile of query rows,
so no two programs write one address.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.configs import Settings, fit
from pallas_kernels.fusion import FusedKind, Sparse, fused
from pallas_kernels.launch import Array, DType, Ref, call, div, dot, put, put_numbers, rem, take, take_numbers
from pallas_kernels.soft_codes import Codes, Hash, Tables, soft_codes


class Geometry(NamedTuple):
    """The static part of a call; R = B * K rows are independent problems.

    Attributes:
      batch: B.
      num_queries: T.
      num_keys: S.
      num_heads: N.
      num_kv_heads: K.
      tables: of the ensemble.
      chunk: tokens of a chunk of keys, and of queries.
      is_causal: query i, at position S - T + i, reads the summary of the chunks before its own and,
        of its own chunk, the keys up to its position. Else all queries read one summary.
      masked: whether there is a key mask.
      shared_planes: whether one set of planes serves all key/value heads.
    """

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    tables: Tables
    chunk: int
    is_causal: bool
    masked: bool
    shared_planes: bool

    @property
    def num_rows(self) -> int:
        """R."""
        return self.batch * self.num_kv_heads

    @property
    def group(self) -> int:
        """G, query heads for each key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_chunks(self) -> int:
        """Chunks of keys."""
        return -(-self.num_keys // self.chunk)

    @property
    def first_place(self) -> int:
        """The place of query 0."""
        return self.num_keys - self.num_queries if self.is_causal else 0

    @property
    def first_chunk(self) -> int:
        """The first chunk that holds a query."""
        return self.first_place // self.chunk

    @property
    def query_chunks(self) -> int:
        """Chunks that hold a query."""
        return -(-(self.first_place + self.num_queries) // self.chunk) - self.first_chunk

    def query_rows(self, row: Array, head: Array, chunk: Array, tile: Array, size: int) -> tuple[Array, Array]:
        """Places and rows (b, i, n) of a tile of queries of one head of the group; no row where there is none."""
        local = tile * size + jnp.arange(size, dtype=jnp.int32)
        place = chunk * self.chunk + local
        index = place - self.first_place
        valid = (local < self.chunk) & (index >= 0) & (index < self.num_queries)
        heads = rem(row, self.num_kv_heads) * self.group + head
        rows = (div(row, self.num_kv_heads) * self.num_queries + index) * self.num_heads + heads
        return place, jnp.where(valid, rows, self.batch * self.num_queries * self.num_heads)

    def key_rows(self, row: Array, chunk: Array, tile: Array, size: int) -> tuple[Array, Array, Array]:
        """Places, rows (b, j, k) and entries (b, j) of the mask of a tile of keys."""
        local = tile * size + jnp.arange(size, dtype=jnp.int32)
        place = chunk * self.chunk + local
        valid = (local < self.chunk) & (place < self.num_keys)
        token = jnp.where(valid, div(row, self.num_kv_heads) * self.num_keys + place, self.batch * self.num_keys)
        rows = token * self.num_kv_heads + jnp.where(valid, rem(row, self.num_kv_heads), 0)
        return place, rows, token


class Inputs(NamedTuple):
    """What every kernel of RACE reads.

    Attributes:
      key, value: (B*S*K, H).
      planes: (1 or K, planes, H) float32, padded with zeros.
      numbers: (2,) float32, beta and eps.
      mask: (B*S,) int8, or (1,) where there is none.
    """

    key: Array
    value: Array
    planes: Array
    numbers: Array
    mask: Array


def summary(inputs: Inputs, geometry: Geometry, settings: Settings) -> tuple[Array, Array]:
    """Bucket masses (chunks, R, F) and bucket values (chunks, R, F, H) of each chunk of keys, float32."""
    shape = geometry.num_chunks, geometry.num_rows, geometry.tables.num_features
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (*shape, inputs.key.shape[1]))]
    kernel = functools.partial(_summary_kernel, geometry=geometry, settings=settings)
    grid = (geometry.num_chunks * geometry.num_rows,)
    mass, values = call(kernel, "race_summary", settings, grid, shapes, inputs)
    return mass, values


def readout(
    inputs: Inputs,
    query: Array,
    mass: Array,
    values: Array,
    dtype: DType,
    geometry: Geometry,
    settings: Settings,
    sparse: Sparse | None = None,
    kind: FusedKind = "elsaa",
) -> tuple[Array, Array]:
    """out (B*T*N, H) = Num / (Den + eps), fused with the sparse branch if there is one, and Den (B*T*N), float32.

    Args:
      inputs: keys, planes and numbers.
      query: (B*T*N, H).
      mass: (query chunks, R, F), what the chunks before each chunk with a query hold; (1, R, F) where not causal.
      values: (query chunks, R, F, H), or (1, R, F, H).
      dtype: of out.
      geometry: what is static.
      settings: of the kernel "race_readout".
      sparse: the sparse branch and how it is fused; None: out is the low-rank branch alone.
      kind: of the fusion.
    """
    tiles = -(-geometry.chunk // fit(settings.query_tile, geometry.chunk))
    kernel = functools.partial(_readout_kernel, geometry=geometry, settings=settings, kind=kind)
    shapes = [jax.ShapeDtypeStruct(query.shape, dtype), jax.ShapeDtypeStruct(query.shape[:1], jnp.float32)]
    grid = (geometry.query_chunks * geometry.num_rows * geometry.group * tiles,)
    arrays = [*inputs, query, mass, values, *(sparse or ())]
    name = "race_readout" if sparse is None else "race_fused_readout"
    out, den = call(kernel, name, settings, grid, shapes, arrays)
    return out, den


def hash_of(inputs: Inputs, row: Array, geometry: Geometry) -> Hash:
    """The hash of a row."""
    index = 0 if geometry.shared_planes else rem(row, geometry.num_kv_heads)
    return Hash(inputs.planes, index, inputs.numbers[0])


def key_codes(refs: Inputs, rows: Array, tokens: Array, hashed: Hash, geometry: Geometry, settings: Settings) -> Codes:
    """Soft codes of a tile of keys, 0 for those that are masked or do not exist."""
    codes = soft_codes(take(refs.key, rows), hashed, geometry.tables, settings)
    there = tokens < geometry.batch * geometry.num_keys
    if geometry.masked:
        there = take_numbers(refs.mask, tokens, 0) != 0
    return codes._replace(codes=jnp.where(there[:, None], codes.codes, 0.0))


def _summary_kernel(*refs: Ref, geometry: Geometry, settings: Settings) -> None:
    inputs, (mass_ref, values_ref) = Inputs(*refs[:5]), refs[5:]
    chunk, row = div(pl.program_id(0), geometry.num_rows), rem(pl.program_id(0), geometry.num_rows)
    size = fit(settings.key_tile, geometry.chunk)
    hashed = hash_of(inputs, row, geometry)
    features, head_dim = values_ref.shape[2:]

    def step(tile, state):
        mass, values = state
        _, rows, tokens = geometry.key_rows(row, chunk, tile, size)
        codes = key_codes(inputs, rows, tokens, hashed, geometry, settings).codes
        value = take(inputs.value, rows).astype(jnp.float32)
        values = values + dot(codes, value, settings=settings, transpose_x=True)
        return mass + jnp.sum(codes, axis=0), values

    zeros = jnp.zeros((features,), jnp.float32), jnp.zeros((features, head_dim), jnp.float32)
    mass, values = lax.fori_loop(0, -(-geometry.chunk // size), step, zeros)
    mass_ref[chunk, row, :] = mass
    values_ref[chunk, row, :, :] = values


def _readout_kernel(*refs: Ref, geometry: Geometry, settings: Settings, kind: FusedKind) -> None:
    inputs, (query_ref, mass_ref, values_ref, *sparse, out_ref, den_ref) = Inputs(*refs[:5]), refs[5:]
    size = fit(settings.query_tile, geometry.chunk)
    tiles = -(-geometry.chunk // size)
    program = pl.program_id(0)
    tile, program = rem(program, tiles), div(program, tiles)
    head, program = rem(program, geometry.group), div(program, geometry.group)
    row, chunk = rem(program, geometry.num_rows), div(program, geometry.num_rows)
    place, rows = geometry.query_rows(row, head, chunk + geometry.first_chunk, tile, size)
    hashed = hash_of(inputs, row, geometry)
    codes = soft_codes(take(query_ref, rows), hashed, geometry.tables, settings).codes
    state = chunk if geometry.is_causal else 0
    den = jnp.sum(codes * mass_ref[state, row, :][None, :], axis=1)
    num = dot(codes, values_ref[state, row, :, :], settings=settings)
    if geometry.is_causal:
        key_size = fit(settings.key_tile, geometry.chunk)

        def step(key_tile, state):
            den, num = state
            key_place, key_rows, tokens = geometry.key_rows(row, chunk + geometry.first_chunk, key_tile, key_size)
            past = key_codes(inputs, key_rows, tokens, hashed, geometry, settings).codes
            kernel = dot(codes, past, settings=settings, transpose_y=True)
            kernel = jnp.where(key_place[None, :] <= place[:, None], kernel, 0.0)
            value = take(inputs.value, key_rows).astype(jnp.float32)
            return den + jnp.sum(kernel, axis=1), num + dot(kernel, value, settings=settings)

        den, num = lax.fori_loop(0, last_tile(tile, size, key_size, geometry.chunk), step, (den, num))
    scale = 1.0 / geometry.tables.num_tables
    den, num = den * scale, num * scale
    # A row without keys has Num = Den = 0, and with eps = 0 nothing to divide by.
    out = num / jnp.where(den > 0, den + inputs.numbers[1], 1.0)[:, None]
    put(out_ref, rows, fused(Sparse(*sparse), kind, rows, out, den, inputs.numbers[1]) if sparse else out)
    put_numbers(den_ref, rows, den)


def last_tile(tile: Array, size: int, other_size: int, chunk: int) -> Array:
    """How many tiles of `other_size` tokens reach up to the end of tile `tile` of `size`, within a chunk."""
    return div(jnp.minimum((tile + 1) * size, chunk) + (other_size - 1), other_size)
