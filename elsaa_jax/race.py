"""The low-rank branch: RACE attention, soft hash buckets in linear time (Alg. 2 and 3 of the paper)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax import checks, dispatch, race_kernels
from elsaa_jax.chunks import (
    from_head_rows,
    join_chunks,
    pad_axis,
    past_of_rows,
    split_chunks,
    to_head_rows,
    unfold,
)
from elsaa_jax.config import MAX_SOFT_BITS, check_int
from elsaa_jax.hashing import corner_products
from elsaa_jax.masses import safe_log
from elsaa_jax.race_kernels import State
from elsaa_jax.types import Array, BranchOutput, Implementation
from pallas_kernels.configs import race_refusal

# Tokens of a chunk where attention is not causal and the chunk is no part of the algorithm.
FULL_CHUNK = 2048
# Below this, 1 / Den would overflow in the derivative of log Den.
TINY_MASS = 1e-30


def race_attention(
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    *,
    beta: float | Array = 1.0,
    num_ensembles: int = 1,
    is_causal: bool = False,
    key_mask: Array | None = None,
    chunk_size: int = 256,
    eps: float = 1e-6,
    implementation: Implementation | None = None,
) -> BranchOutput:
    """Attention with the kernel (1/L) sum_l phi_l(q) . phi_l(k), phi_l the soft codes of table l.

    Den = sum_j kernel(q, k_j), Num = sum_j kernel(q, k_j) v_j, out = Num / (Den + eps), and
    log_mass = log Den. With M ensembles the outputs are averaged, and log_mass is the logarithm
    of the mean Den. The causal form sums over chunks before a query's own by a prefix sum of
    chunk summaries, and over its own chunk by a masked product.

    Args:
      query: (B, T, N, H).
      key: (B, S, K, H).
      value: (B, S, K, H).
      planes: (M*L, P, H), or (K, M*L, P, H) with one set for each key/value head; the tables of
        an ensemble stand together.
      beta: sharpness of the soft codes, a scalar, may be traced.
      num_ensembles: M.
      is_causal: query i is the (S - T + i)-th position and attends to positions up to its own.
      key_mask: (B, S) bool, True = attend.
      chunk_size: C of the causal form.
      eps: floor of the denominator.
      implementation: see `elsaa_jax.dispatch`.

    Returns:
      out (B, T, N, H) and log_mass (B, T, N).
    """
    checks.check_qkv(query, key, value, is_causal)
    checks.check_mask("key_mask", key_mask, key.shape[0], key.shape[1])
    checks.check_scalar("beta", beta, positive=True)
    checks.check_scalar("eps", eps)
    static = make_race(query, key, planes, num_ensembles, is_causal, chunk_size, implementation)
    return _race(static, query, key, value, planes, beta, key_mask, eps)


class Race(NamedTuple):
    """The static part of a call."""

    causal_chunk: int | None
    num_ensembles: int
    route: dispatch.Route


def make_race(
    query: Array,
    key: Array,
    planes: Array,
    num_ensembles: int,
    is_causal: bool,
    chunk_size: int,
    implementation: Implementation | None,
) -> Race:
    """The static part of a call, after a check of the planes; arguments as of `race_attention`."""
    _check_planes(planes, key, num_ensembles)
    check_int("chunk_size", chunk_size, 1)
    tables = jnp.shape(planes)[-3] // num_ensembles
    chunk = min(chunk_size, key.shape[1]) if is_causal else None
    route = dispatch.route(implementation, race_refusal(query, key, tables, jnp.shape(planes)[-2], chunk))
    return Race(chunk, num_ensembles, route)


@functools.partial(jax.jit, static_argnums=0)
def _race(
    static: Race,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: float | Array,
    key_mask: Array | None,
    eps: float | Array,
) -> BranchOutput:
    key, value = checks.zero_masked_keys(key_mask, key, value)
    numbers = jnp.asarray(beta, jnp.float32), jnp.asarray(eps, jnp.float32)
    out, den = _attend(static, query, key, value, planes, *numbers, key_mask)
    return BranchOutput(out, log_mass_of(den))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: Race,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: Array,
    eps: Array,
    key_mask: Array | None,
) -> tuple[Array, Array]:
    """out (B, T, N, H), in the query's dtype, and Den (B, T, N)."""
    return _attend_fwd(static, query, key, value, planes, beta, eps, key_mask)[0]


def _attend_fwd(static, *arrays):
    kernels = functools.partial(race_kernels.forward, layout_of(static))
    out, den, state = dispatch.choose(static.route, kernels, functools.partial(forward, static), *arrays)
    return (out, den), (arrays, state)


def _attend_bwd(static, residuals, cotangents):
    arrays, state = residuals
    kernels = functools.partial(race_kernels.backward, layout_of(static))
    xla = functools.partial(backward, static)
    return *dispatch.choose(static.route, kernels, xla, *arrays, state, *cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def layout_of(static: Race) -> race_kernels.Layout:
    """How its kernels are laid out."""
    route = static.route
    return race_kernels.Layout(static.causal_chunk, static.num_ensembles, route.target, route.arithmetic)


def forward(static, query, key, value, planes, beta, eps, key_mask):
    """out, Den and what they were read from."""
    state = _state(static, query.shape[1], key, value, planes, beta, key_mask)
    return *_readout(static, query, key, value, planes, beta, eps, key_mask, state), state


def backward(static, query, key, value, planes, beta, eps, key_mask, state, d_out, d_den, out_weight=None):
    """The derivatives of `forward`; soft codes are computed again, chunk by chunk. See `race_kernels.backward`."""

    def readout(query, key, value, planes, beta, eps, state):
        return _readout(static, query, key, value, planes, beta, eps, key_mask, state)

    def summarise(key, value, planes, beta):
        return _state(static, query.shape[1], key, value, planes, beta, key_mask)

    (out, _), readout_vjp = jax.vjp(readout, query, key, value, planes, beta, eps, state)
    d_weight: tuple[Array, ...] = ()
    if out_weight is not None:
        wide = d_out.astype(jnp.float32)
        d_weight = (jnp.sum(out.astype(jnp.float32) * wide, axis=-1),)
        d_out = (wide * out_weight[..., None]).astype(d_out.dtype)
    d_query, *of_readout, d_eps, d_state = readout_vjp((d_out, d_den))
    _, state_vjp = jax.vjp(summarise, key, value, planes, beta)
    d_key, d_value, d_planes, d_beta = jax.tree.map(jnp.add, tuple(of_readout), state_vjp(d_state))
    return d_query, d_key, d_value, d_planes, d_beta, d_eps, *d_weight


def _check_planes(planes: Array, key: Array, num_ensembles: int) -> None:
    check_int("num_ensembles", num_ensembles, 1)
    num_kv_heads, head_dim = key.shape[2:]
    shape = jnp.shape(planes)
    shared = len(shape) == 3
    if not (shared or (len(shape) == 4 and shape[0] == num_kv_heads)) or shape[-1] != head_dim:
        raise ValueError(
            f"planes has shape {shape}; it must be (tables, bits, {head_dim}), or ({num_kv_heads}, tables, bits, "
            f"{head_dim}) with one set for each key/value head"
        )
    check_int("the number of bits of the planes", shape[-2], 1, MAX_SOFT_BITS)
    if shape[-3] == 0 or shape[-3] % num_ensembles:
        raise ValueError(f"num_ensembles is {num_ensembles}; it must divide the {shape[-3]} tables of the planes")


def log_mass_of(den: Array) -> Array:
    """log Den, -inf and without derivative where it is 0; elsewhere the derivative is at most 1 / TINY_MASS."""
    bounded = jnp.log(jnp.maximum(den, TINY_MASS))
    return jnp.where(den > 0, bounded + lax.stop_gradient(safe_log(den) - bounded), -jnp.inf)


class Codes(NamedTuple):
    """The soft codes of one call. Tokens are the last axis, so that the products over bits run over
    contiguous memory; R = B * K rows, X = G * C tokens of a row.
    """

    planes: Array
    beta: float | Array
    num_ensembles: int

    @property
    def num_tables(self) -> int:
        """L, the tables of one ensemble."""
        return self.planes.shape[-3] // self.num_ensembles

    def __call__(self, x: Array, num_kv_heads: int) -> Array:
        """(B, C, K * G, H) -> (R, M, F, X), F = L * 2**P."""
        rows = to_head_rows(x, num_kv_heads).astype(jnp.float32)
        *heads, tables, bits, head_dim = self.planes.shape
        planes = self.planes.astype(jnp.float32).reshape(*heads, tables * bits, head_dim)
        planes = jnp.tile(planes, (x.shape[0], 1, 1)) if heads else planes
        subscripts = "rxh,rph->rpx" if heads else "rxh,ph->rpx"
        dots = jnp.einsum(subscripts, rows, planes, precision=lax.Precision.HIGHEST)
        codes = corner_products(dots.reshape(len(rows), tables, bits, -1), self.beta, axis=2)
        return codes.reshape(len(rows), self.num_ensembles, -1, dots.shape[-1])

    def of_keys(self, key: Array, valid: Array) -> Array:
        """(B, C, K, H) -> (R, M, F, C), 0 for masked keys."""
        valid = jnp.repeat(valid, key.shape[2], axis=0)
        return jnp.where(valid[:, None, None, :], self(key, key.shape[2]), 0.0)


def _summary(codes: Codes, key: Array, value: Array, valid: Array) -> tuple[Array, Array]:
    """Bucket masses (R, M, F) and bucket values (R, M, F, H) of a chunk of keys."""
    key_codes = codes.of_keys(key, valid)
    rows = to_head_rows(value, key.shape[2]).astype(jnp.float32)
    values = jnp.einsum("rfc,rch->rfh", key_codes.reshape(len(rows), -1, rows.shape[1]), rows)
    return key_codes.sum(-1), values.reshape(*key_codes.shape[:3], -1)


def _read(query_codes: Array, mass: Array, values: Array) -> tuple[Array, Array]:
    """L Den (R, M, X) and L Num (R, M, X, H) of queries that see these summaries."""
    rows = query_codes.shape[:2]
    query_codes, mass, values = (x.reshape(-1, *x.shape[2:]) for x in (query_codes, mass, values))
    den = jnp.einsum("zfx,zf->zx", query_codes, mass)
    num = jnp.einsum("zfx,zfh->zxh", query_codes, values)
    return den.reshape(*rows, -1), num.reshape(*rows, *num.shape[1:])


def _read_past(query_codes: Array, key_codes: Array, value: Array) -> tuple[Array, Array]:
    """As `_read`, of the keys (R, M, F, C) of the chunk itself, up to each query's own."""
    (num_rows, ensembles, _, num_queries), length = query_codes.shape, key_codes.shape[-1]
    flat_queries, flat_keys = (x.reshape(-1, *x.shape[2:]) for x in (query_codes, key_codes))
    kernel = jnp.einsum("zfx,zfs->zxs", flat_queries, flat_keys)
    kernel = jnp.where(past_of_rows(num_queries, length)[None], kernel, 0.0)
    kernel = kernel.reshape(num_rows, ensembles * num_queries, length)
    num = jnp.einsum("rxs,rsh->rxh", kernel, value.astype(jnp.float32))
    den = kernel.sum(-1)
    return den.reshape(num_rows, ensembles, -1), num.reshape(num_rows, ensembles, num_queries, -1)


def _finish(den: Array, num: Array, codes: Codes, eps: float | Array) -> tuple[Array, Array]:
    """out (R, X, H), the mean over the ensembles of Num / (Den + eps), and Den (R, X), theirs."""
    den, num = den / codes.num_tables, num / codes.num_tables
    # A row without keys has Num = Den = 0, and with eps = 0 nothing to divide by.
    return jnp.mean(num / jnp.where(den > 0, den + eps, 1.0)[..., None], axis=1), den.mean(1)


def _state(
    static: Race, num_queries: int, key: Array, value: Array, planes: Array, beta: Array, key_mask: Array | None
) -> State:
    """What queries read: the summary of all keys, or those of the chunks before each chunk with a query."""
    codes = Codes(planes, beta, static.num_ensembles)
    batch, num_keys = key.shape[:2]
    size = static.causal_chunk or min(FULL_CHUNK, num_keys)
    chunks = [split_chunks(x, size) for x in (key, value, _valid(key, key_mask))]

    def summarise(chunk):
        return _summary(codes, *unfold(chunk, batch))

    if static.causal_chunk is not None:
        # Alg. 3: a prefix sum of chunk summaries.
        summaries = lax.map(jax.checkpoint(summarise), chunks)
        upto = lax.associative_scan(lambda a, b: jax.tree.map(jnp.add, a, b), summaries)
        first = (num_keys - num_queries) // size
        return State(*(pad_axis(x, 0, 1, 0)[first:-1] for x in upto))

    def add(total, chunk):
        return jax.tree.map(jnp.add, total, summarise(chunk)), None

    shapes = jax.eval_shape(summarise, [x[0] for x in chunks])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return State(*lax.scan(jax.checkpoint(add), zeros, chunks)[0])


def _readout(
    static: Race,
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    beta: Array,
    eps: Array,
    key_mask: Array | None,
    state: State,
) -> tuple[Array, Array]:
    """out and Den from the state and, where causal, from each query's own chunk."""
    codes = Codes(planes, beta, static.num_ensembles)
    batch, num_queries = query.shape[:2]
    num_keys, num_kv_heads = key.shape[1:3]
    if static.causal_chunk is None:
        # Alg. 2. Chunks bound the memory: none of the soft codes outlives its own.
        size, start = min(FULL_CHUNK, num_queries), 0

        def read(chunk):
            (query,) = unfold(chunk, batch)
            parts = _finish(*_read(codes(query, num_kv_heads), *state), codes, eps)
            return tuple(from_head_rows(x, num_kv_heads, size) for x in parts)

        out, den = lax.map(jax.checkpoint(read), (split_chunks(query, size),))
    else:
        size = static.causal_chunk
        first, start = divmod(num_keys - num_queries, size)

        def read_causally(chunk):
            tokens, before = chunk
            query, key, value, valid = unfold(tokens, batch)
            query_codes = codes(query, num_kv_heads)
            den, num = _read(query_codes, *before)
            own = _read_past(query_codes, codes.of_keys(key, valid), to_head_rows(value, num_kv_heads))
            parts = _finish(den + own[0], num + own[1], codes, eps)
            return tuple(from_head_rows(x, num_kv_heads, size) for x in parts)

        keys = (split_chunks(x, size)[first:] for x in (key, value, _valid(key, key_mask)))
        tokens = split_chunks(query, size, start), *keys
        out, den = lax.map(jax.checkpoint(read_causally), (tokens, state))
    out, den = join_chunks(out, num_queries, start), join_chunks(den, num_queries, start)
    return out.astype(query.dtype), den


def _valid(key: Array, key_mask: Array | None) -> Array:
    return jnp.ones(key.shape[:2], bool) if key_mask is None else key_mask
