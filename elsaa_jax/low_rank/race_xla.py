"""RACE in XLA, chunk by chunk; soft codes are never kept. `race_kernels` is the same by GPU kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from elsaa_jax.arrays.chunks import (
    equal_size,
    fold,
    from_head_rows,
    join_chunks,
    largest_divisor,
    pad_axis,
    split_chunks,
    to_head_rows,
)
from elsaa_jax.arrays.masses import dot_rows, mix, safe_log
from elsaa_jax.arrays.packing import pack
from elsaa_jax.arrays.weights import fusion_weights
from elsaa_jax.low_rank.call import RaceArrays, RaceCall, State
from elsaa_jax.types import Array
from pallas_kernels.fusion import Sparse
from pallas_kernels.soft_codes import CODE_SCALE, DEN_SCALE

# Non-causal: rows (tokens of all sequences and heads) that are summarised or read at a time, and tokens of a part of
# them. Parts are computed side by side, on all cores and in their caches.
ROWS_AT_A_TIME, PART = 32_768, 1024
# Causal: tokens of the chunks that are summarised or read at a time.
CAUSAL_TOKENS = 2048
# Logarithm of the factor of all soft codes.
LOG_SCALE = math.log(CODE_SCALE)
# Below this, 1 / Den would overflow in the derivative of log Den. Den carries the factor DEN_SCALE.
TINY_DEN = 1e-36


def forward(call: RaceCall, arrays: RaceArrays, sparse: Sparse | None) -> tuple[Array, Array, State]:
    """Computes the output, DEN_SCALE times Den, and the state; see `race_kernels.forward`."""
    state = _state(call, arrays.key, arrays.value, arrays.planes, arrays.beta, arrays.key_mask)
    if sparse is None:
        return *_readout(call, arrays, state, None, ()), state

    def finish(out: Array, den: Array, *rows: Array) -> Array:
        return mix(rows[0], out, fused_weights(call, Sparse(*rows), den, arrays.eps))

    return *_readout(call, arrays, state, finish, sparse), state


def backward(
    call: RaceCall, arrays: RaceArrays, state: State, d_out: Array, d_den: Array, out_weight: Array | None
) -> tuple[RaceArrays, Array | None]:
    """Computes the derivatives of `forward`; see `race_kernels.backward`. Soft codes are computed again."""
    rows = () if out_weight is None else (out_weight,)

    def readout(arrays: RaceArrays, state: State, rows: tuple[Array, ...]) -> tuple[Array, Array]:
        arrays = arrays._replace(key_mask=key_mask)
        return _readout(call, arrays, state, _weigh if rows else None, rows)

    def summarise(key: Array, value: Array, planes: Array, beta: Array) -> State:
        return _state(call, key, value, planes, beta, key_mask)

    key_mask = arrays.key_mask
    arrays = arrays._replace(key_mask=None)
    _, readout_vjp = jax.vjp(readout, arrays, state, rows)
    d_arrays, d_state, d_rows = readout_vjp((d_out, d_den))
    _, state_vjp = jax.vjp(summarise, arrays.key, arrays.value, arrays.planes, arrays.beta)
    of_readout = d_arrays.key, d_arrays.value, d_arrays.planes, d_arrays.beta
    d_key, d_value, d_planes, d_beta = jax.tree.map(jnp.add, of_readout, state_vjp(d_state))
    d_arrays = d_arrays._replace(key=d_key, value=d_value, planes=d_planes, beta=d_beta)
    return d_arrays, d_rows[0] if d_rows else None


def fused_weights(call: RaceCall, sparse: Sparse, den: Array, eps: Array) -> tuple[Array, Array]:
    """Returns the weights of the sparse and of the low-rank output in the fused readout."""
    masses, gates = (sparse.log_mass, log_mass_of(den)), (sparse.gate_sparse, sparse.gate_low_rank)
    assert call.fusion is not None
    return fusion_weights(masses, gates, sparse.lam, eps, call.fusion, call.stop_gradient_mass)


def log_mass_of(den: Array) -> Array:
    """Returns log Den; -inf and without derivative where it is 0, elsewhere with a derivative that does not overflow.

    Args:
      den: DEN_SCALE times Den.
    """
    bounded = jnp.log(jnp.maximum(den, TINY_DEN))
    return bounded + lax.stop_gradient(safe_log(den) - math.log(DEN_SCALE) - bounded)


def _weigh(out: Array, den: Array, weight: Array) -> Array:
    """Multiplies the output by its weight in a fusion."""
    del den
    return out * weight[..., None]


class Codes(NamedTuple):
    """The soft codes of one call, as exponentials of matrix products, which XLA fuses on a CPU (`arrays.packing`).

    A code prod_p sigmoid(2 v_p u_p), with u_p = beta tanh(w_p . x) and the signs v_p of its corner, is
    exp(sum_p v_p u_p - sum_p log(2 cosh u_p)). All codes carry the factor `soft_codes.CODE_SCALE` of the kernels.
    Rows: Z = B * K * M, X = G * C tokens of a row, F = L * 2**P.

    Attributes:
      planes: Hash planes, (M*L, P, H) or (K, M*L, P, H).
      beta: Sharpness of the soft codes.
      num_ensembles: M.
    """

    planes: Array
    beta: float | Array
    num_ensembles: int

    @property
    def num_tables(self) -> int:
        """Tables of one ensemble, L."""
        return self.planes.shape[-3] // self.num_ensembles

    def rows(self, x: Array, num_kv_heads: int) -> Array:
        """Transposes (B, C, K * G, H) to (Z, X, H), float32."""
        x = to_head_rows(x, num_kv_heads).astype(jnp.float32)
        return x if self.num_ensembles == 1 else jnp.repeat(x, self.num_ensembles, axis=0)

    def of_queries(self, rows: Array) -> Array:
        """Computes the codes (Z, X, F) of queries (Z, X, H)."""
        turns, norms = self._turns(_precisely("zxh,zph->zxp", rows, self._planes(len(rows))))
        turns, norms = (x.reshape(*rows.shape[:2], self.num_tables, -1) for x in (turns, norms))
        return jnp.exp(_exponents(turns, norms) + LOG_SCALE).reshape(*rows.shape[:2], -1)

    def of_keys(self, rows: Array, valid: Array) -> Array:
        """Computes the codes (Z, F, C) of keys (Z, C, H), 0 for masked keys; `valid` is (B, C)."""
        turns, norms = self._turns(_precisely("zph,zxh->zpx", self._planes(len(rows)), rows))
        turns, norms = (x.reshape(len(rows) * self.num_tables, -1, rows.shape[1]) for x in (turns, norms))
        corners = _copies(_signs(self.planes.shape[-2]).T[None, None], len(turns))[0]
        exponents = _precisely("zcp,zpx->zcx", corners, turns) - norms.sum(1)[:, None, :]
        codes = jnp.exp(exponents + LOG_SCALE).reshape(len(rows), -1, rows.shape[1])
        return codes * jnp.repeat(valid.astype(jnp.float32), len(rows) // len(valid), axis=0)[:, None, :]

    def _planes(self, num_rows: int) -> Array:
        """Returns the planes of each row, (Z, L * P, H)."""
        planes = self.planes.astype(jnp.float32).reshape(
            -1, self.num_tables * self.planes.shape[-2], self.planes.shape[-1]
        )
        return _copies(planes[None], num_rows // len(planes))[0]

    def _turns(self, dots: Array) -> tuple[Array, Array]:
        """Returns u and log(2 cosh u)."""
        turns = self.beta * jnp.tanh(dots)
        size = jnp.abs(turns)
        return turns, size + jnp.log1p(jnp.exp(-2 * size))


def _bits(number: int) -> np.ndarray:
    """Returns the bits of each corner, (P, 2**P)."""
    return (np.arange(2**number)[None, :] >> np.arange(number)[:, None] & 1).astype(np.float32)


def _signs(number: int) -> Array:
    """Returns the signs of each corner, (P, 2**P)."""
    return jnp.asarray(2 * _bits(number) - 1)


@jax.custom_vjp
def _exponents(turns: Array, norms: Array) -> Array:
    """Computes sum_p v_p u_p - log(2 cosh u_p) for all corners, (Z, X, L, P) -> (Z, X, L, 2**P).

    The derivative of the norms is a sum over all corners. It is computed as two matrix products, over the corners
    with a bit and over those without it, because XLA's sum takes longer than all the rest.
    """
    return _precisely("zxlp,pc->zxlc", turns, _signs(turns.shape[-1])) - norms.sum(-1)[..., None]


def _exponents_fwd(turns: Array, norms: Array) -> tuple[Array, int]:
    return _exponents(turns, norms), turns.shape[-1]


def _exponents_bwd(number: int, d_exponents: Array) -> tuple[Array, Array]:
    bits = _bits(number)
    ones, zeros = (_precisely("zxlc,pc->zxlp", d_exponents, jnp.asarray(x)) for x in (bits, 1 - bits))
    return ones - zeros, -ones - zeros


_exponents.defvjp(_exponents_fwd, _exponents_bwd)


def _copies(x: Array, number: int) -> Array:
    """Repeats (A, C, ...) to (A, number * C, ...) in memory.

    XLA of jaxlib 0.10 computes wrong products if a factor is a broadcast that it fuses. It does not fuse a reversal.
    """
    return lax.rev(jnp.tile(lax.rev(x, (1,)), (1, number, *(1 for _ in x.shape[2:]))), (1,))


def _precisely(subscripts: str, x: Array, y: Array) -> Array:
    """Computes an einsum at the highest precision: the result goes into an exponent."""
    return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def _divide(num: Array, den: Array) -> Array:
    """Divides rows (..., H) by (..., 1)."""
    return num / den


def _divide_fwd(num: Array, den: Array) -> tuple[Array, tuple[Array, Array]]:
    out = num / den
    return out, (out, den)


def _divide_bwd(residuals: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    out, den = residuals
    return d_out / den, -dot_rows(d_out, out)[..., None] / den


_divide.defvjp(_divide_fwd, _divide_bwd)


def _summary(codes: Codes, key: Array, value: Array, valid: Array) -> tuple[Array, Array]:
    """Sums a chunk of keys into bucket masses (R, M, F) and bucket values (R, M, F, H)."""
    keys, values = (codes.rows(x, key.shape[2]) for x in (key, value))
    key_codes = codes.of_keys(keys, valid)
    values, mass = pack(jnp.einsum("zfc,zch->zfh", key_codes, values), key_codes.sum(-1))
    values = values.reshape(-1, codes.num_ensembles, *values.shape[1:])
    return mass.reshape(values.shape[:3]), values


def _read(
    codes: Codes,
    query: Array,
    num_kv_heads: int,
    state: State,
    eps: Array,
    own: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Computes the output (B, C, N, H) and DEN_SCALE times Den (B, C, N) of a chunk of queries.

    Args:
      codes: Soft codes of the call.
      query: Chunk of queries, (B, C, N, H).
      num_kv_heads: K.
      state: Bucket sums that all queries of the chunk read, (R, M, F) and (R, M, F, H).
      eps: Floor of the denominator.
      own: Key, value and validity of the chunk that holds the queries, which read its past; or None.
    """
    mass, values = (x.reshape(-1, *x.shape[2:]) for x in state)
    query_codes = codes.of_queries(codes.rows(query, num_kv_heads))
    num = jnp.einsum("zxf,zfh->zxh", query_codes, values)
    den = jnp.sum(query_codes * mass[:, None, :], axis=-1)
    if own is not None:
        *keys, valid = own
        key_rows, value_rows = (codes.rows(x, num_kv_heads) for x in keys)
        kernel = jnp.einsum("zxf,zfs->zxs", query_codes, codes.of_keys(key_rows, valid))
        past = jnp.tri(kernel.shape[2], dtype=jnp.float32)
        kernel = kernel * jnp.tile(past, (kernel.shape[1] // kernel.shape[2], 1))[None]
        num, den = num + jnp.einsum("zxs,zsh->zxh", kernel, value_rows), den + kernel.sum(-1)
    num, den = (x.reshape(-1, codes.num_ensembles, *x.shape[1:]) / codes.num_tables for x in pack(num, den))
    # A row without keys has Num = Den = 0, and with eps = 0 nothing to divide by.
    out = jnp.mean(_divide(num, jnp.where(den > 0, den + eps * DEN_SCALE, 1.0)), axis=1)
    length = query.shape[1]
    return from_head_rows(out, num_kv_heads, length), from_head_rows(den[..., 0].mean(1), num_kv_heads, length)


def _state(call: RaceCall, key: Array, value: Array, planes: Array, beta: Array, key_mask: Array | None) -> State:
    """Computes the bucket sums that queries read."""
    codes = Codes(planes, beta, call.num_ensembles)
    batch, num_keys = key.shape[:2]
    parts, size = _parts(key) if call.causal_chunk is None else (1, call.causal_chunk)
    chunks = [split_chunks(x, size) for x in (key, value, _valid(key, key_mask))]
    if call.causal_chunk is not None:
        # Alg. 3: a prefix sum of chunk summaries.
        num_chunks = len(chunks[0])
        number = largest_divisor(num_chunks, CAUSAL_TOKENS // size)

        def summarise(some: list[Array]) -> list[Array]:
            sums = _summary(codes, *[x.reshape(number * batch, -1, *x.shape[1:]) for x in some])
            return [x.reshape(number, -1, *x.shape[1:]) for x in sums]

        summaries = [
            x.reshape(num_chunks, *x.shape[2:]) for x in lax.map(jax.checkpoint(summarise), fold(chunks, number))
        ]
        upto = lax.associative_scan(lambda a, b: jax.tree.map(jnp.add, a, b), summaries)
        first = (num_keys - call.facts.num_queries) // size
        return State(*(pad_axis(x, 0, 1, 0)[first:-1] for x in upto))

    def add(total: list[Array], chunk: list[Array]) -> tuple[list[Array], None]:
        of_parts = _summary(codes, *[x.reshape(batch * parts, -1, *x.shape[1:]) for x in chunk])
        sums = [x.reshape(batch, parts, -1, *x.shape[1:]).sum(1) for x in of_parts]
        return [a + b.reshape(a.shape) for a, b in zip(total, sums, strict=True)], None

    buckets = batch * key.shape[2], call.num_ensembles, codes.num_tables * 2 ** planes.shape[-2]
    zeros = [jnp.zeros(buckets, jnp.float32), jnp.zeros((*buckets, key.shape[3]), jnp.float32)]
    return State(*lax.scan(jax.checkpoint(add), zeros, chunks)[0])


def _readout(
    call: RaceCall,
    arrays: RaceArrays,
    state: State,
    finish: Callable[..., Array] | None,
    rows: Sequence[Array],
) -> tuple[Array, Array]:
    """Computes the output and DEN_SCALE times Den from the state and, if causal, from each query's own chunk.

    Args:
      call: Static facts.
      arrays: Arrays of the call.
      state: Bucket sums.
      finish: Function that turns a chunk of the output, its Den and chunks of `rows` into the final output; or None.
      rows: Further arrays (B, T, N, ...).
    """
    query, key, value, planes, beta, eps, key_mask = arrays
    codes = Codes(planes, beta, call.num_ensembles)
    batch, num_queries = query.shape[:2]
    num_keys, num_kv_heads = key.shape[1:3]
    if call.causal_chunk is None:
        # Alg. 2. Chunks bound the memory: none of the soft codes outlives its own.
        (parts, size), start = _parts(query), 0
        of_parts = State(*(_copies(x.reshape(batch, -1, *x.shape[1:]), parts).reshape(-1, *x.shape[1:]) for x in state))

        def read(chunk: list[Array]) -> tuple[Array, Array]:
            query, *rows = [x.reshape(batch * parts, -1, *x.shape[1:]) for x in chunk]
            out, den = _read(codes, query, num_kv_heads, of_parts, eps)
            out = out if finish is None else finish(out, den, *rows)
            return out.reshape(batch, size, *out.shape[2:]), den.reshape(batch, size, *den.shape[2:])

        out, den = lax.map(jax.checkpoint(read), [split_chunks(x, size) for x in (query, *rows)])
    else:
        size = call.causal_chunk
        first, start = divmod(num_keys - num_queries, size)
        keys = (split_chunks(x, size)[first:] for x in (key, value, _valid(key, key_mask)))
        tokens = split_chunks(query, size, start), *keys, *(split_chunks(x, size, start) for x in rows)
        number = largest_divisor(len(tokens[0]), CAUSAL_TOKENS // size)

        def read_causally(some: tuple[list[Array], State]) -> tuple[Array, Array]:
            tokens, before = some
            tokens = [x.reshape(number * batch, -1, *x.shape[1:]) for x in tokens]
            query, key, value, valid, *rows = tokens
            out, den = _read(codes, query, num_kv_heads, before, eps, (key, value, valid))
            out = out if finish is None else finish(out, den, *rows)
            return out.reshape(number, batch, *out.shape[1:]), den.reshape(number, batch, *den.shape[1:])

        parts = lax.map(jax.checkpoint(read_causally), (fold(tokens, number), State(*fold(state, number))))
        out, den = (x.reshape(-1, *x.shape[2:]) for x in parts)
    out, den = join_chunks(out, num_queries, start), join_chunks(den, num_queries, start)
    return out.astype(query.dtype), den


def _parts(x: Array) -> tuple[int, int]:
    """Returns the number of parts of a chunk of tokens (B, T, heads, H), and the number of its tokens."""
    batch, length, heads = x.shape[:3]
    at_a_time = max(1, ROWS_AT_A_TIME // (batch * heads))
    number = -(-min(length, at_a_time) // PART)
    return number, number * equal_size(-(-length // number), max(1, at_a_time // number))


def _valid(key: Array, key_mask: Array | None) -> Array:
    return jnp.ones(key.shape[:2], bool) if key_mask is None else key_mask
