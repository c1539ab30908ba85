"""The low-rank branch in XLA, the counterpart of `race_kernels`: chunk by chunk, soft codes never kept."""

from __future__ import annotations

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
    past_of_rows,
    split_chunks,
    to_head_rows,
    unfold,
)
from elsaa_jax.arrays.masses import dot_rows
from elsaa_jax.arrays.packing import pack
from elsaa_jax.low_rank.race_kernels import Layout, State
from elsaa_jax.types import Array

# Rows (tokens of all sequences and heads) that are summarised or read at a time, where attention is not causal, and
# tokens of a part of them: parts are computed side by side, on all cores and in their caches.
ROWS_AT_A_TIME, PART = 32_768, 1024
# Where it is causal, tokens of the chunks that are summarised or read at a time.
CAUSAL_TOKENS = 2048


def _weigh(out: Array, den: Array, *weight: Array) -> Array:
    """What becomes of out: it is weighed, or left as it is."""
    del den
    return out * weight[0][..., None] if weight else out


def forward(layout, query, key, value, planes, beta, eps, key_mask, finish=_weigh, rows=()):
    """out, Den and what they were read from; `finish` and `rows` as of `_readout`."""
    state = _state(layout, query.shape[1], key, value, planes, beta, key_mask)
    return *_readout(layout, query, key, value, planes, beta, eps, key_mask, state, finish, rows), state


def backward(layout, query, key, value, planes, beta, eps, key_mask, state, d_out, d_den, out_weight=None):
    """The derivatives of `forward`; soft codes are computed again, chunk by chunk. See `race_kernels.backward`."""
    rows = () if out_weight is None else (out_weight,)

    def readout(query, key, value, planes, beta, eps, state, rows):
        return _readout(layout, query, key, value, planes, beta, eps, key_mask, state, _weigh, rows)

    def summarise(key, value, planes, beta):
        return _state(layout, query.shape[1], key, value, planes, beta, key_mask)

    _, readout_vjp = jax.vjp(readout, query, key, value, planes, beta, eps, state, rows)
    d_query, *of_readout, d_eps, d_state, d_rows = readout_vjp((d_out, d_den))
    _, state_vjp = jax.vjp(summarise, key, value, planes, beta)
    d_key, d_value, d_planes, d_beta = jax.tree.map(jnp.add, tuple(of_readout), state_vjp(d_state))
    return d_query, d_key, d_value, d_planes, d_beta, d_eps, *d_rows


class Codes(NamedTuple):
    """The soft codes of one call, as exponentials of products of matrices, which XLA fuses on a CPU (`packing`).

    A code prod_p sigmoid(2 v_p u_p), with u_p = beta tanh(w_p . x) and the signs v_p of its corner, is
    exp(sum_p v_p u_p - sum_p log(2 cosh u_p)). Rows: Z = B * K * M, X = G * C tokens of a row, F = L * 2**P.
    """

    planes: Array
    beta: float | Array
    num_ensembles: int

    @property
    def num_tables(self) -> int:
        """L, the tables of one ensemble."""
        return self.planes.shape[-3] // self.num_ensembles

    def rows(self, x: Array, num_kv_heads: int) -> Array:
        """(B, C, K * G, H) -> (Z, X, H), float32."""
        x = to_head_rows(x, num_kv_heads).astype(jnp.float32)
        return x if self.num_ensembles == 1 else jnp.repeat(x, self.num_ensembles, axis=0)

    def of_queries(self, rows: Array) -> Array:
        """(Z, X, H) -> (Z, X, F)."""
        turns, norms = self._turns(_precisely("zxh,zph->zxp", rows, self._planes(len(rows))))
        turns, norms = (x.reshape(*rows.shape[:2], self.num_tables, -1) for x in (turns, norms))
        return jnp.exp(_exponents(turns, norms)).reshape(*rows.shape[:2], -1)

    def of_keys(self, rows: Array, valid: Array) -> Array:
        """(Z, C, H) -> (Z, F, C), 0 for masked keys; `valid` is (B, C)."""
        turns, norms = self._turns(_precisely("zph,zxh->zpx", self._planes(len(rows)), rows))
        turns, norms = (x.reshape(len(rows) * self.num_tables, -1, rows.shape[1]) for x in (turns, norms))
        corners = _copies(_signs(self.planes.shape[-2]).T[None, None], len(turns))[0]
        exponents = _precisely("zcp,zpx->zcx", corners, turns) - norms.sum(1)[:, None, :]
        codes = jnp.exp(exponents).reshape(len(rows), -1, rows.shape[1])
        return codes * jnp.repeat(valid.astype(jnp.float32), len(rows) // len(valid), axis=0)[:, None, :]

    def _planes(self, num_rows: int) -> Array:
        """(Z, L * P, H)."""
        planes = self.planes.astype(jnp.float32).reshape(
            -1, self.num_tables * self.planes.shape[-2], self.planes.shape[-1]
        )
        return _copies(planes[None], num_rows // len(planes))[0]

    def _turns(self, dots: Array) -> tuple[Array, Array]:
        """u and log(2 cosh u)."""
        turns = self.beta * jnp.tanh(dots)
        size = jnp.abs(turns)
        return turns, size + jnp.log1p(jnp.exp(-2 * size))


def _bits(number: int) -> np.ndarray:
    """(P, 2**P): the bits of each corner."""
    return (np.arange(2**number)[None, :] >> np.arange(number)[:, None] & 1).astype(np.float32)


def _signs(number: int) -> Array:
    """(P, 2**P): the signs of each corner."""
    return jnp.asarray(2 * _bits(number) - 1)


@jax.custom_vjp
def _exponents(turns: Array, norms: Array) -> Array:
    """sum_p v_p u_p - log(2 cosh u_p) of all corners, (Z, X, L, P) -> (Z, X, L, 2**P).

    The derivative of the norms, a sum over all corners, is that over the corners with a bit and that over those
    without it: by products, as XLA's sum takes longer than all the rest.
    """
    return _precisely("zxlp,pc->zxlc", turns, _signs(turns.shape[-1])) - norms.sum(-1)[..., None]


def _exponents_fwd(turns, norms):
    return _exponents(turns, norms), turns.shape[-1]


def _exponents_bwd(number, d_exponents):
    bits = _bits(number)
    ones, zeros = (_precisely("zxlc,pc->zxlp", d_exponents, jnp.asarray(x)) for x in (bits, 1 - bits))
    return ones - zeros, -ones - zeros


_exponents.defvjp(_exponents_fwd, _exponents_bwd)


def _copies(x: Array, number: int) -> Array:
    """(A, C, ...) -> (A, number * C, ...), in memory.

    XLA of jaxlib 0.10 gets products wrong whose factor is a broadcast that it fuses; a reversal it does not fuse.
    """
    return lax.rev(jnp.tile(lax.rev(x, (1,)), (1, number, *(1 for _ in x.shape[2:]))), (1,))


def _precisely(subscripts: str, x: Array, y: Array) -> Array:
    """A product that ends up in an exponent."""
    return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def _divide(num: Array, den: Array) -> Array:
    """num / den, of rows (..., H) and (..., 1)."""
    return num / den


def _divide_fwd(num, den):
    out = num / den
    return out, (out, den)


def _divide_bwd(residuals, d_out):
    out, den = residuals
    return d_out / den, -dot_rows(d_out, out)[..., None] / den


_divide.defvjp(_divide_fwd, _divide_bwd)


def _summary(codes: Codes, key: Array, value: Array, valid: Array) -> tuple[Array, Array]:
    """Bucket masses (R, M, F) and bucket values (R, M, F, H) of a chunk of keys."""
    keys, values = (codes.rows(x, key.shape[2]) for x in (key, value))
    key_codes = codes.of_keys(keys, valid)
    values, mass = pack(jnp.einsum("zfc,zch->zfh", key_codes, values), key_codes.sum(-1))
    values = values.reshape(-1, codes.num_ensembles, *values.shape[1:])
    return mass.reshape(values.shape[:3]), values


def _read(codes: Codes, query: Array, num_kv_heads: int, state: State, eps: Array, own=None) -> tuple[Array, Array]:
    """out (B, C, N, H) and Den (B, C, N) of queries that see a state, and what lies before them in their own chunk.

    Args:
      codes: of the call.
      query: a chunk.
      num_kv_heads: K.
      state: mass (R, M, F) and values (R, M, F, H).
      eps: floor of the denominator.
      own: key, value and valid of the chunk that the queries stand in.
    """
    mass, values = (x.reshape(-1, *x.shape[2:]) for x in state)
    query_codes = codes.of_queries(codes.rows(query, num_kv_heads))
    num = jnp.einsum("zxf,zfh->zxh", query_codes, values)
    den = jnp.sum(query_codes * mass[:, None, :], axis=-1)
    if own is not None:
        *keys, valid = own
        key_rows, value_rows = (codes.rows(x, num_kv_heads) for x in keys)
        kernel = jnp.einsum("zxf,zfs->zxs", query_codes, codes.of_keys(key_rows, valid))
        kernel = kernel * past_of_rows(kernel.shape[1], kernel.shape[2]).astype(jnp.float32)[None]
        num, den = num + jnp.einsum("zxs,zsh->zxh", kernel, value_rows), den + kernel.sum(-1)
    num, den = (x.reshape(-1, codes.num_ensembles, *x.shape[1:]) / codes.num_tables for x in pack(num, den))
    # A row without keys has Num = Den = 0, and with eps = 0 nothing to divide by.
    out = jnp.mean(_divide(num, jnp.where(den > 0, den + eps, 1.0)), axis=1)
    length = query.shape[1]
    return from_head_rows(out, num_kv_heads, length), from_head_rows(den[..., 0].mean(1), num_kv_heads, length)


def _state(
    layout: Layout, num_queries: int, key: Array, value: Array, planes: Array, beta: Array, key_mask: Array | None
) -> State:
    """What queries read: the summary of all keys, or those of the chunks before each chunk with a query."""
    codes = Codes(planes, beta, layout.num_ensembles)
    batch, num_keys = key.shape[:2]
    parts, size = _parts(key) if layout.causal_chunk is None else (1, layout.causal_chunk)
    chunks = [split_chunks(x, size) for x in (key, value, _valid(key, key_mask))]
    if layout.causal_chunk is not None:
        # Alg. 3: a prefix sum of chunk summaries.
        num_chunks = len(chunks[0])
        number = largest_divisor(num_chunks, CAUSAL_TOKENS // size)

        def summarise(some):
            return [x.reshape(number, -1, *x.shape[1:]) for x in _summary(codes, *unfold(some, number * batch))]

        summaries = [
            x.reshape(num_chunks, *x.shape[2:]) for x in lax.map(jax.checkpoint(summarise), fold(chunks, number))
        ]
        upto = lax.associative_scan(lambda a, b: jax.tree.map(jnp.add, a, b), summaries)
        first = (num_keys - num_queries) // size
        return State(*(pad_axis(x, 0, 1, 0)[first:-1] for x in upto))

    def add(total, chunk):
        sums = (
            x.reshape(batch, parts, -1, *x.shape[1:]).sum(1) for x in _summary(codes, *unfold(chunk, batch * parts))
        )
        return [a + b.reshape(a.shape) for a, b in zip(total, sums, strict=True)], None

    buckets = batch * key.shape[2], layout.num_ensembles, codes.num_tables * 2 ** planes.shape[-2]
    zeros = [jnp.zeros(buckets, jnp.float32), jnp.zeros((*buckets, key.shape[3]), jnp.float32)]
    return State(*lax.scan(jax.checkpoint(add), zeros, chunks)[0])


def _readout(
    layout: Layout,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: Array,
    eps: Array,
    key_mask: Array | None,
    state: State,
    finish: Callable[..., Array],
    rows: Sequence[Array],
) -> tuple[Array, Array]:
    """out and Den from the state and, where causal, from each query's own chunk.

    `finish(out, Den, *rows)` gives what becomes of out, chunk by chunk; `rows` are (B, T, N, ...).
    """
    codes = Codes(planes, beta, layout.num_ensembles)
    batch, num_queries = query.shape[:2]
    num_keys, num_kv_heads = key.shape[1:3]
    if layout.causal_chunk is None:
        # Alg. 2. Chunks bound the memory: none of the soft codes outlives its own.
        (parts, size), start = _parts(query), 0
        of_parts = State(*(_copies(x.reshape(batch, -1, *x.shape[1:]), parts).reshape(-1, *x.shape[1:]) for x in state))

        def read(chunk):
            query, *rows = unfold(chunk, batch * parts)
            out, den = _read(codes, query, num_kv_heads, of_parts, eps)
            return tuple(x.reshape(batch, size, *x.shape[2:]) for x in (finish(out, den, *rows), den))

        out, den = lax.map(jax.checkpoint(read), [split_chunks(x, size) for x in (query, *rows)])
    else:
        size = layout.causal_chunk
        first, start = divmod(num_keys - num_queries, size)
        keys = (split_chunks(x, size)[first:] for x in (key, value, _valid(key, key_mask)))
        tokens = split_chunks(query, size, start), *keys, *(split_chunks(x, size, start) for x in rows)
        number = largest_divisor(len(tokens[0]), CAUSAL_TOKENS // size)

        def read_causally(some):
            tokens, before = some
            query, key, value, valid, *rows = unfold(tokens, number * batch)
            out, den = _read(codes, query, num_kv_heads, before, eps, (key, value, valid))
            return tuple(x.reshape(number, batch, *x.shape[1:]) for x in (finish(out, den, *rows), den))

        parts = lax.map(jax.checkpoint(read_causally), (fold(tokens, number), State(*fold(state, number))))
        out, den = (x.reshape(-1, *x.shape[2:]) for x in parts)
    out, den = join_chunks(out, num_queries, start), join_chunks(den, num_queries, start)
    return out.astype(query.dtype), den


def _parts(x: Array) -> tuple[int, int]:
    """Into how many parts a chunk of tokens (B, T, heads, H) is split, and tokens of a chunk."""
    batch, length, heads = x.shape[:3]
    at_a_time = max(1, ROWS_AT_A_TIME // (batch * heads))
    number = -(-min(length, at_a_time) // PART)
    return number, number * equal_size(-(-length // number), max(1, at_a_time // number))


def _valid(key: Array, key_mask: Array | None) -> Array:
    return jnp.ones(key.shape[:2], bool) if key_mask is None else key_mask
