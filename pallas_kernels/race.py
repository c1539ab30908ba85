"""RACE forward: one kernel sums chunks of keys into soft buckets, and another reads the sums for each query.

A call handles one ensemble of hash tables. The kernels compute soft codes and never write them to memory. A program of
the summary kernel owns the buckets of one chunk, and a program of the readout kernel owns one tile of query rows, so no
two programs write the same address.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.configs import CompiledName, Settings, fit
from pallas_kernels.fusion import FusedKind, Sparse, fused
from pallas_kernels.launch import Array, DType, Ref, call, div, dot, put, put_numbers, rem, take, take_numbers
from pallas_kernels.soft_codes import Codes, Hash, Tables, soft_codes


class Geometry(NamedTuple):
    """Sizes and options of a RACE call. Hashable, so it can be a static argument of `jit`.

    The call consists of R = B * K independent problems, one for each batch element and key/value head.

    Attributes:
      batch: Batch size, B.
      num_queries: Number of query positions, T.
      num_keys: Number of key positions, S.
      num_heads: Number of query heads, N.
      num_kv_heads: Number of key/value heads, K.
      tables: Hash tables of the ensemble.
      chunk: Number of tokens in a chunk of keys, and in a chunk of queries.
      is_causal: Whether a query sees only keys up to its own position; query i is at position S - T + i. It reads the
        summed buckets of the chunks before its own, and the keys of its own chunk up to its position. A non-causal
        query reads the sum over all keys.
      masked: Whether there is a key mask.
      shared_planes: Whether all key/value heads share one set of hash planes.
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
        """Number of independent problems, R = B * K."""
        return self.batch * self.num_kv_heads

    @property
    def group(self) -> int:
        """Number of query heads per key/value head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_chunks(self) -> int:
        """Number of chunks of keys."""
        return -(-self.num_keys // self.chunk)

    @property
    def first_place(self) -> int:
        """Position of query 0."""
        return self.num_keys - self.num_queries if self.is_causal else 0

    @property
    def first_chunk(self) -> int:
        """Index of the first chunk that holds a query."""
        return self.first_place // self.chunk

    @property
    def query_chunks(self) -> int:
        """Number of chunks that hold a query."""
        return -(-(self.first_place + self.num_queries) // self.chunk) - self.first_chunk

    def query_rows(self, row: Array, head: Array, chunk: Array, tile: Array, size: int) -> tuple[Array, Array]:
        """Computes the positions and rows of a tile of queries of one head.

        Args:
          row: Index of the problem (batch element and key/value head).
          head: Index of the query head among the G heads of the key/value head.
          chunk: Index of the chunk.
          tile: Index of the tile within the chunk.
          size: Number of queries in the tile.

        Returns:
          The positions and the rows in the flattened queries, (size,) each. Queries that do not exist get the row
          B * T * N, which is padding.
        """
        local = tile * size + jnp.arange(size, dtype=jnp.int32)
        place = chunk * self.chunk + local
        index = place - self.first_place
        valid = (local < self.chunk) & (index >= 0) & (index < self.num_queries)
        heads = rem(row, self.num_kv_heads) * self.group + head
        rows = (div(row, self.num_kv_heads) * self.num_queries + index) * self.num_heads + heads
        return place, jnp.where(valid, rows, self.batch * self.num_queries * self.num_heads)

    def key_rows(self, row: Array, chunk: Array, tile: Array, size: int) -> tuple[Array, Array, Array]:
        """Computes the positions, rows and mask entries of a tile of keys.

        Args:
          row: Index of the problem (batch element and key/value head).
          chunk: Index of the chunk.
          tile: Index of the tile within the chunk.
          size: Number of keys in the tile.

        Returns:
          The positions, the rows in the flattened keys, and the entries in the flattened mask, (size,) each. Keys that
          do not exist get a row and an entry past the end, which is padding.
        """
        local = tile * size + jnp.arange(size, dtype=jnp.int32)
        place = chunk * self.chunk + local
        valid = (local < self.chunk) & (place < self.num_keys)
        token = jnp.where(valid, div(row, self.num_kv_heads) * self.num_keys + place, self.batch * self.num_keys)
        rows = token * self.num_kv_heads + jnp.where(valid, rem(row, self.num_kv_heads), 0)
        return place, rows, token


class Inputs(NamedTuple):
    """Arrays that all RACE kernels read.

    Attributes:
      key: Flattened keys, (B*S*K, H).
      value: Flattened values, (B*S*K, H).
      planes: Hash planes, padded with zeros, (1 or K, planes, H) float32.
      numbers: The sharpness beta and DEN_SCALE times eps, (2,) float32.
      mask: Key mask, (B*S,) int8; (1,) without a mask.
    """

    key: Array
    value: Array
    planes: Array
    numbers: Array
    mask: Array


def summary(inputs: Inputs, geometry: Geometry, settings: Settings) -> tuple[Array, Array]:
    """Sums each chunk of keys into soft buckets.

    Args:
      inputs: Keys, values, planes, numbers and mask.
      geometry: Sizes and options of the call.
      settings: Settings of the kernel "race_summary".

    Returns:
      The bucket masses (chunks, R, F) and bucket values (chunks, R, F, H) of each chunk, float32.
    """
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
    """Computes out = Num / (Den + eps) of every query, fused with the sparse branch if it is given.

    Args:
      inputs: Keys, values, planes, numbers and mask.
      query: Flattened queries, (B*T*N, H).
      mass: Bucket masses summed over the chunks before each chunk that holds a query, (query chunks, R, F). Non-causal:
        summed over all chunks, (1, R, F).
      values: Bucket values, summed likewise, (query chunks, R, F, H) or (1, R, F, H).
      dtype: Dtype of the output.
      geometry: Sizes and options of the call.
      settings: Settings of the kernel "race_readout".
      sparse: Results of the sparse branch to fuse. None returns the output of the low-rank branch alone.
      kind: Formula of the fusion.

    Returns:
      The output, (B*T*N, H), and the denominator Den, (B*T*N,) float32.
    """
    tiles = -(-geometry.chunk // fit(settings.query_tile, geometry.chunk))
    kernel = functools.partial(_readout_kernel, geometry=geometry, settings=settings, kind=kind)
    shapes = [jax.ShapeDtypeStruct(query.shape, dtype), jax.ShapeDtypeStruct(query.shape[:1], jnp.float32)]
    grid = (geometry.query_chunks * geometry.num_rows * geometry.group * tiles,)
    arrays = [*inputs, query, mass, values, *(sparse or ())]
    name: CompiledName = "race_readout" if sparse is None else "race_fused_readout"
    out, den = call(kernel, name, settings, grid, shapes, arrays)
    return out, den


def hash_of(inputs: Inputs, row: Array, geometry: Geometry) -> Hash:
    """Returns the hash planes and sharpness of problem `row`."""
    index = 0 if geometry.shared_planes else rem(row, geometry.num_kv_heads)
    return Hash(inputs.planes, index, inputs.numbers[0])


def key_codes(refs: Inputs, rows: Array, tokens: Array, hashed: Hash, geometry: Geometry, settings: Settings) -> Codes:
    """Computes the soft codes of a tile of keys. Masked keys and padding get zeros."""
    codes = soft_codes(take(refs.key, rows), hashed, geometry.tables, settings)
    there = tokens < geometry.batch * geometry.num_keys
    if geometry.masked:
        there = take_numbers(refs.mask, tokens, 0) != 0
    return codes._replace(codes=jnp.where(there[:, None], codes.codes, 0.0))


def _summary_kernel(*refs: Ref, geometry: Geometry, settings: Settings) -> None:
    """Sums one chunk of keys of one problem into soft buckets."""
    inputs, (mass_ref, values_ref) = Inputs(*refs[:5]), refs[5:]
    chunk, row = div(pl.program_id(0), geometry.num_rows), rem(pl.program_id(0), geometry.num_rows)
    size = fit(settings.key_tile, geometry.chunk)
    hashed = hash_of(inputs, row, geometry)
    features, head_dim = values_ref.shape[2:]

    def step(tile: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
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
    """Computes the output of one tile of queries of one head."""
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

        def step(key_tile: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
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
    # A query without keys has Num = Den = 0. Dividing by 1 then avoids 0 / 0 if eps is 0.
    out = num / jnp.where(den > 0, den + inputs.numbers[1], 1.0)[:, None]
    put(out_ref, rows, fused(Sparse(*sparse), kind, rows, out, den, inputs.numbers[1]) if sparse else out)
    put_numbers(den_ref, rows, den)


def last_tile(tile: Array, size: int, other_size: int, chunk: int) -> Array:
    """Returns how many tiles of `other_size` tokens cover a chunk up to the end of its tile `tile` of `size` tokens."""
    return div(jnp.minimum((tile + 1) * size, chunk) + (other_size - 1), other_size)
