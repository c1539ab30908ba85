"""The baseline Performer: attention with positive orthogonal random features (FAVOR+)."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from elsaa_jax.arrays.chunks import (
    from_head_rows,
    join_chunks,
    pad_axis,
    past_of_rows,
    split_chunks,
    to_head_rows,
    unfold,
)
from elsaa_jax.arrays.guards import zero_masked
from elsaa_jax.arrays.masses import dot_rows, safe_log, safe_max
from elsaa_jax.checks import check_call, check_int, check_planes, check_scalar
from elsaa_jax.types import Array, BranchOutput

FULL_CHUNK = 2048
CAUSAL_CHUNK = 256
# Largest exponent whose exponential is finite in float32.
MAX_EXPONENT = 80.0
MAX_FEATURES = 2**16


def sample_projection(rng: Array, num_features: int, head_dim: int) -> Array:
    """Draws orthogonal random features (F, H) float32: rows are orthogonal in groups of H and have Gaussian norms.

    Args:
      rng: Random key.
      num_features: F.
      head_dim: H.

    Example:
      >>> import jax
      >>> from elsaa_jax import sample_projection
      >>> sample_projection(jax.random.key(0), 24, 16).shape
      (24, 16)
    """
    check_int("num_features", num_features, 1)
    check_int("head_dim", head_dim, 1)
    direction_rng, norm_rng = jax.random.split(rng)
    groups = -(-num_features // head_dim)
    square = jax.random.normal(direction_rng, (groups, head_dim, head_dim), jnp.float32)
    directions = jnp.linalg.qr(square)[0].swapaxes(1, 2).reshape(-1, head_dim)[:num_features]
    norms = jnp.linalg.norm(jax.random.normal(norm_rng, (num_features, head_dim), jnp.float32), axis=1)
    return directions * norms[:, None]


def performer_attention(
    query: Array,
    key: Array,
    value: Array,
    projection: Array,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    eps: float = 1e-6,
) -> BranchOutput:
    """Attends with the kernel phi(q) . phi(k), an unbiased estimate of exp(q . k / sqrt(H)).

    phi_f(x) = exp(w_f . x H^-1/4 - |x|^2 / (2 sqrt(H))) / sqrt(F). Den = sum_j phi(q) . phi(k_j),
    out = Num / (Den + eps), log_mass = log Den. Exponents are shifted by running maxima over the
    past alone, so the causal form is strictly causal and nothing overflows.

    Args:
      query: Queries, (B, T, N, H).
      key: Keys, (B, S, K, H).
      value: Values, (B, S, K, H).
      projection: Random features, (F, H), or (K, F, H) with one set for each key/value head.
      is_causal: Whether query i, at position S - T + i, attends to positions up to its own only.
      key_mask: Keys that take part, (B, S) bool, True = attend.
      eps: Floor of the denominator.

    Returns:
      The output (B, T, N, H) and the log-mass (B, T, N).

    Example:
      >>> import jax
      >>> from elsaa_jax import performer_attention, sample_projection
      >>> x = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))
      >>> performer_attention(x, x, x, sample_projection(jax.random.key(1), 32, 16)).out.shape
      (1, 64, 2, 16)
    """
    facts = check_call(query, key, value, is_causal=is_causal, key_mask=key_mask)
    check_scalar("eps", eps)
    check_planes("projection", projection, ("features",), facts, MAX_FEATURES)
    return _performer(is_causal, query, key, value, projection, key_mask, eps)


@functools.partial(jax.jit, static_argnums=0)
def _performer(
    is_causal: bool,
    query: Array,
    key: Array,
    value: Array,
    projection: Array,
    key_mask: Array | None,
    eps: float | Array,
) -> BranchOutput:
    query, key, value = zero_masked(query, key, value, None, key_mask)
    valid = jnp.ones(key.shape[:2], bool) if key_mask is None else key_mask
    attend = _causal if is_causal else _full
    out, log_mass = attend(query, key, value, valid, projection, eps)
    return BranchOutput(out.astype(query.dtype), log_mass)


class _Summary(NamedTuple):
    """Sums over keys of phi(k) and phi(k) v, without 1/sqrt(F) and divided by exp(top).

    Attributes:
      top: Largest exponent of each row, (R,).
      mass: Sum of phi(k), (R, F).
      values: Sum of phi(k) v, (R, F, H).
    """

    top: Array
    mass: Array
    values: Array


def _exponents(x: Array, projection: Array, num_kv_heads: int) -> Array:
    """Computes log(sqrt(F) phi) of (B, C, K * G, H), as (R, F, X) with X = G * C."""
    rows = to_head_rows(x, num_kv_heads).astype(jnp.float32) * x.shape[-1] ** -0.25
    projection = projection.astype(jnp.float32)
    per_head = projection.ndim == 3
    projection = jnp.tile(projection, (x.shape[0], 1, 1)) if per_head else projection
    subscripts = "rxh,rfh->rfx" if per_head else "rxh,fh->rfx"
    dots = jnp.einsum(subscripts, rows, projection, precision=lax.Precision.HIGHEST)
    return dots - dot_rows(rows, rows)[:, None] / 2


def _key_exponents(key: Array, valid: Array, projection: Array) -> Array:
    """Computes the exponents (R, F, C) of keys (B, C, K, H), -inf for masked keys."""
    valid = jnp.repeat(valid, key.shape[2], axis=0)
    return jnp.where(valid[:, None], _exponents(key, projection, key.shape[2]), -jnp.inf)


def _query_features(query: Array, projection: Array, num_kv_heads: int) -> tuple[Array, Array]:
    """Returns features (R, F, X) divided by exp(top), and top (R, X)."""
    exponents = _exponents(query, projection, num_kv_heads)
    top = lax.stop_gradient(exponents.max(1))
    return jnp.exp(exponents - top[:, None]), top


def _summarize(key: Array, value: Array, valid: Array, projection: Array) -> _Summary:
    exponents = _key_exponents(key, valid, projection)
    top = lax.stop_gradient(exponents.max((1, 2)))
    features = jnp.exp(exponents - safe_max(top)[:, None, None])
    rows = to_head_rows(value, key.shape[2]).astype(jnp.float32)
    return _Summary(top, features.sum(-1), jnp.einsum("rfc,rch->rfh", features, rows))


def _add(a: _Summary, b: _Summary) -> _Summary:
    top = jnp.maximum(a.top, b.top)
    from_a, from_b = (jnp.exp(x.top - safe_max(top))[..., None] for x in (a, b))
    return _Summary(top, a.mass * from_a + b.mass * from_b, a.values * from_a[..., None] + b.values * from_b[..., None])


def _read(features: Array, before: _Summary) -> tuple[Array, Array]:
    """Returns Den (R, X) and Num (R, X, H)."""
    return jnp.einsum("rfx,rf->rx", features, before.mass), jnp.einsum("rfx,rfh->rxh", features, before.values)


def _finish(den: Array, num: Array, top: Array, num_features: int, eps: float | Array) -> tuple[Array, Array]:
    """Returns the output (R, X, H) and the log-mass (R, X) from Den and Num divided by exp(top); eps adds to Den."""
    shift = top - math.log(num_features)
    floor = eps * jnp.exp(jnp.minimum(-shift, MAX_EXPONENT))
    # A row without keys has Num = Den = 0, and with eps = 0 nothing to divide by.
    return num / jnp.where(den > 0, den + floor, 1.0)[..., None], safe_log(den) + shift


def _full(
    query: Array, key: Array, value: Array, valid: Array, projection: Array, eps: float | Array
) -> tuple[Array, Array]:
    batch, num_queries = query.shape[:2]
    num_kv_heads, num_features = key.shape[2], projection.shape[-2]
    query_size, size = min(FULL_CHUNK, num_queries), min(FULL_CHUNK, key.shape[1])
    chunks = split_chunks(key, size), split_chunks(value, size), split_chunks(valid, size)

    def add(total: _Summary, chunk: tuple[Array, ...]) -> tuple[_Summary, None]:
        return _add(total, _summarize(*unfold(chunk, batch), projection)), None

    def read(chunk: tuple[Array, ...]) -> tuple[Array, ...]:
        (query,) = unfold(chunk, batch)
        features, top = _query_features(query, projection, num_kv_heads)
        parts = _finish(*_read(features, total), top + safe_max(total.top)[:, None], num_features, eps)
        return tuple(from_head_rows(x, num_kv_heads, query_size) for x in parts)

    first, rest = [x[0] for x in chunks], [x[1:] for x in chunks]
    total, _ = lax.scan(jax.checkpoint(add), _summarize(*unfold(first, batch), projection), rest)
    out, log_mass = lax.map(jax.checkpoint(read), (split_chunks(query, query_size),))
    return join_chunks(out, num_queries), join_chunks(log_mass, num_queries)


def _causal(
    query: Array, key: Array, value: Array, valid: Array, projection: Array, eps: float | Array
) -> tuple[Array, Array]:
    batch, num_queries = query.shape[:2]
    num_keys, num_kv_heads = key.shape[1:3]
    size = min(CAUSAL_CHUNK, num_keys)
    first, start = divmod(num_keys - num_queries, size)
    chunks = split_chunks(key, size), split_chunks(value, size), split_chunks(valid, size)
    summaries = lax.map(jax.checkpoint(lambda chunk: _summarize(*unfold(chunk, batch), projection)), chunks)
    upto = lax.associative_scan(_add, summaries)
    before = _Summary(*(pad_axis(x, 0, 1, 0, fill)[first:-1] for x, fill in zip(upto, (-jnp.inf, 0, 0), strict=True)))

    def read(chunk: tuple[tuple[Array, ...], _Summary]) -> tuple[Array, ...]:
        tokens, before = chunk
        query, key, value, valid = unfold(tokens, batch)
        features, query_top = _query_features(query, projection, num_kv_heads)
        den, num = _read(features, before)
        exponents = _key_exponents(key, valid, projection)
        # Each key has a shift of its own; a query's is the largest of those up to it.
        key_top = lax.stop_gradient(exponents.max(1))
        group = features.shape[-1] // size
        top = jnp.tile(jnp.maximum(lax.cummax(key_top, axis=1), before.top[:, None]), (1, group))
        base = safe_max(top)
        key_features = jnp.exp(exponents - safe_max(key_top)[:, None])
        past = past_of_rows(features.shape[-1], size)[None]
        shift = jnp.exp(jnp.where(past, key_top[:, None, :] - base[..., None], -jnp.inf))
        kernel = jnp.einsum("rfx,rfs->rxs", features, key_features) * shift
        keep = jnp.exp(before.top[:, None] - base)
        den = den * keep + kernel.sum(-1)
        values = to_head_rows(value, num_kv_heads).astype(jnp.float32)
        num = num * keep[..., None] + jnp.einsum("rxs,rsh->rxh", kernel, values)
        parts = _finish(den, num, query_top + base, projection.shape[-2], eps)
        return tuple(from_head_rows(x, num_kv_heads, size) for x in parts)

    tokens = (split_chunks(query, size, start), *(x[first:] for x in chunks))
    out, log_mass = lax.map(jax.checkpoint(read), (tokens, before))
    return join_chunks(out, num_queries, start), join_chunks(log_mass, num_queries, start)
