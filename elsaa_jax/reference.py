"""The O(N^2) definition of every function of the library, slow and obvious: all tests compare with it.

No fast code imports this module, and it imports none. Softmax attention is a dense softmax under a boolean matrix
"who attends to whom"; RACE and Performer are dense kernel matrices. What has no gradient (hash codes, orders,
supports) is NumPy on concrete values, loop by loop; the rest is jax.numpy, so that `jax.grad` works through it.
Axis letters are those of `elsaa_jax.types`; the paper's algorithms are cited by their titles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from elsaa_jax.config import ElsaaConfig
from elsaa_jax.types import Array, BranchOutput, FusionKind, Pairing

Mask: TypeAlias = Array | None
Scale: TypeAlias = float | None
Number: TypeAlias = Array | float
_DEFAULT_CONFIG = ElsaaConfig()
_einsum = functools.partial(jnp.einsum, precision="highest")


def _float32(x: Any) -> Array:
    return jnp.asarray(x).astype(jnp.float32)


def _log(x: Array) -> Array:
    """Returns log x; -inf with gradient 0 where x == 0."""
    return jnp.where(x == 0, -jnp.inf, jnp.log(jnp.where(x == 0, 1.0, x)))


def _ratio(numerator: Array, denominator: Array) -> Array:
    """Divides (..., H) by (...); the result is 0 with gradient 0 where the denominator is 0."""
    zero = (denominator == 0)[..., None]
    return jnp.where(zero, 0.0, numerator / jnp.where(zero, 1.0, denominator[..., None]))


def _exp_shifted(logits: Array, allowed: Array) -> tuple[Array, Array]:
    """Returns exp(logits - top), 0 where not allowed, and top (..., 1), the largest allowed logit of a row or 0."""
    allowed = jnp.broadcast_to(allowed, logits.shape)
    top = lax.stop_gradient(jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1, keepdims=True))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    return jnp.exp(jnp.where(allowed, logits - top, -jnp.inf)), top


def _logsumexp(x: Array) -> Array:
    """Returns log sum exp over the last axis; -inf with gradient 0 where every term is -inf."""
    terms, top = _exp_shifted(x, ~jnp.isneginf(x))
    return top[..., 0] + _log(jnp.sum(terms, axis=-1))


def _to_query_heads(x: Array, num_heads: int, axis: int) -> Array:
    """Repeats the K key/value heads so that query head n finds its head, n // (N // K), at index n."""
    return jnp.repeat(x, num_heads // x.shape[axis], axis=axis)


def _allowed(query: Array, key: Array, is_causal: bool, key_mask: Mask) -> Array:
    """Returns whether query i may see key j, (B, 1, T, S): j is valid and, in causal attention, j <= S - T + i."""
    length, num_keys = query.shape[1], key.shape[1]
    if is_causal and length > num_keys:
        raise ValueError(f"is_causal needs T <= S, not T = {length} and S = {num_keys}")
    position = num_keys - length + np.arange(length)
    past = position[:, None] >= np.arange(num_keys)[None, :] if is_causal else np.ones((length, num_keys), bool)
    valid = jnp.ones((query.shape[0], num_keys), bool) if key_mask is None else jnp.asarray(key_mask)
    return jnp.asarray(past)[None, None, :, :] & valid[:, None, None, :]


def _kernel_attention(kernel: Array, top: Array, value: Array, eps: float) -> BranchOutput:
    """Computes Den = sum_j K_ij, out = sum_j K_ij v_j / (Den + eps) and log Den, for K = exp(top) kernel."""
    den = jnp.sum(kernel, axis=-1)
    floor = eps * jnp.exp(-top[..., 0]) if eps else 0.0
    out = _ratio(_einsum("bnts,bsnh->bnth", kernel, value), den + floor)
    log_mass = top[..., 0] + _log(den)
    return BranchOutput(out.swapaxes(1, 2), log_mass.swapaxes(1, 2))


def _softmax_attention(query: Array, key: Array, value: Array, allowed: Array, scale: Scale) -> BranchOutput:
    """Computes Eq. 2 over the allowed keys: d_i = sum_j exp z_ij, o_i = sum_j exp(z_ij) v_j / d_i, log_mass = log d."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    key, value = (_to_query_heads(_float32(x), query.shape[2], axis=2) for x in (key, value))
    logits = _einsum("btnh,bsnh->bnts", _float32(query), key) * scale
    out, log_mass = _kernel_attention(*_exp_shifted(logits, allowed), value, eps=0.0)
    return BranchOutput(out.astype(query.dtype), log_mass)


def exact_attention(
    query: Array, key: Array, value: Array, *, is_causal: bool = False, key_mask: Mask = None, scale: Scale = None
) -> BranchOutput:
    """Computes dense attention over all keys that a query may see (Eq. 1 and 2)."""
    return _softmax_attention(query, key, value, _allowed(query, key, is_causal, key_mask), scale)


def hard_codes(x: Array | np.ndarray, planes: Array | np.ndarray) -> np.ndarray:
    """Computes sum_p 2^p [x . planes_p > 0] of x (..., H) with planes (P, H), or of x (..., K, H) with (K, P, H)."""
    equation = "...h,ph->...p" if planes.ndim == 2 else "...kh,kph->...kp"
    bits = np.einsum(equation, np.asarray(x, np.float64), np.asarray(planes, np.float64)) > 0
    return np.sum(bits * 2 ** np.arange(bits.shape[-1]), axis=-1).astype(np.int32)


def gray_rank(codes: Any, num_bits: int) -> np.ndarray:
    """Returns the rank of each code in the reflected Gray sequence 0, 1, 3, 2, 6, ...; member r is r ^ (r >> 1)."""
    rank_of_code = np.empty(2**num_bits, np.int32)
    for rank in range(2**num_bits):
        rank_of_code[rank ^ (rank >> 1)] = rank
    return rank_of_code[np.asarray(codes)]


def _pair(
    support: np.ndarray,
    queries: Sequence[int],
    keys: Sequence[int],
    *,
    turns: Sequence[int],
    num_turns: int,
    query_rank: np.ndarray,
    key_rank: np.ndarray,
    pairing: Pairing,
    block_size: int,
    num_neighbors: int,
) -> None:
    """Marks in support (T, S) the keys that each query of one head meets in Alg. "sortLSH Sparse Exact Attention".

    Queries and keys are sorted by the Gray rank of their codes (Python's sort is stable), and the sorted keys are cut
    into blocks. Each query has a place among the sorted keys and meets the block of that place, and its neighbours:
    "rank": the r-th of n_q queries is at place floor(r n_k / n_q), so that equal counts meet block by block;
    "bucket": in the bucket [low, high) of keys with its own code, at floor((high - low) (2 turn + 1) / (2 num_turns)).
    """
    sorted_queries = sorted(queries, key=lambda i: query_rank[i])
    sorted_keys = sorted(keys, key=lambda j: key_rank[j])
    turn_of = dict(zip(queries, turns, strict=True))
    for r, i in enumerate(sorted_queries):
        if pairing == "rank":
            place = r * len(keys) // len(queries)
        else:
            low = sum(key_rank[j] < query_rank[i] for j in keys)
            high = sum(key_rank[j] <= query_rank[i] for j in keys)
            place = min(low + (high - low) * (2 * turn_of[i] + 1) // (2 * num_turns), len(keys) - 1)
        block = place // block_size
        first, last = max(block - num_neighbors, 0), block + num_neighbors
        for j in sorted_keys[first * block_size : (last + 1) * block_size]:
            support[i, j] = True


def _pair_causally(support: np.ndarray, queries: Sequence[int], keys: Sequence[int], base: int, pair: Callable) -> None:
    """Runs Alg. "Causal sortLSH Sparse Exact Attention Branch" for one head, level by level instead of recursively.

    Stretches of `base` positions, aligned at 0, attend exactly; then, for m = base, 2 base, ..., the second half of
    each window of 2m meets its first half. Query i stands at position S - T + i.
    """
    length, num_keys = support.shape
    position = {i: num_keys - length + i for i in queries}
    for i in queries:
        for j in keys:
            support[i, j] = j <= position[i] and j // base == position[i] // base
    m = base
    while m < num_keys:
        for start in range(0, num_keys, 2 * m):
            past = [j for j in keys if start <= j < start + m]
            future = [i for i in queries if start + m <= position[i] < start + 2 * m]
            pair(support, future, past, turns=[position[i] - (start + m) for i in future], num_turns=m)
        m *= 2


def sort_lsh_support(
    query: Array | np.ndarray,
    key: Array | np.ndarray,
    planes: Array | np.ndarray,
    *,
    block_size: int = 256,
    min_length: int = 0,
    num_neighbors: int = 0,
    pairing: Pairing | None = None,
    is_causal: bool = False,
    query_mask: Mask = None,
    key_mask: Mask = None,
) -> np.ndarray:
    """Returns which query attends to which key in the sparse branch, (B, N, T, S) bool, for concrete arrays."""
    (batch, length, num_heads, _), (num_keys, num_kv_heads) = query.shape, key.shape[1:3]
    group = num_heads // num_kv_heads
    query_planes = planes if planes.ndim == 2 else np.repeat(np.asarray(planes), group, axis=0)
    query_rank = gray_rank(hard_codes(query, query_planes), planes.shape[-2])
    key_rank = gray_rank(hard_codes(key, planes), planes.shape[-2])
    query_valid = np.ones((batch, length), bool) if query_mask is None else np.asarray(query_mask)
    key_valid = np.ones((batch, num_keys), bool) if key_mask is None else np.asarray(key_mask)

    support = np.zeros((batch, num_heads, length, num_keys), bool)
    for b, n in np.ndindex(batch, num_heads):
        queries = [i for i in range(length) if query_valid[b, i]]
        keys = [j for j in range(num_keys) if key_valid[b, j]]
        pair = functools.partial(
            _pair,
            query_rank=query_rank[b, :, n],
            key_rank=key_rank[b, :, n // group],
            pairing=pairing or ("bucket" if is_causal else "rank"),
            block_size=block_size,
            num_neighbors=num_neighbors,
        )
        if is_causal:
            _pair_causally(support[b, n], queries, keys, min_length or block_size, pair)
        elif num_keys <= min_length:
            support[b, n][np.ix_(queries, keys)] = True
        else:
            pair(support[b, n], queries, keys, turns=range(len(queries)), num_turns=len(queries))
    return support


def _traced_support(query: Array, key: Array, planes: Array, query_mask: Mask, key_mask: Mask, **options: Any) -> Array:
    """Computes `sort_lsh_support` of arrays that may be traced, by a callback that gets the concrete values."""
    query_mask = jnp.ones(query.shape[:2], bool) if query_mask is None else jnp.asarray(query_mask)
    key_mask = jnp.ones(key.shape[:2], bool) if key_mask is None else jnp.asarray(key_mask)
    return jax.pure_callback(
        lambda q, k, w, q_mask, k_mask: sort_lsh_support(q, k, w, query_mask=q_mask, key_mask=k_mask, **options),
        jax.ShapeDtypeStruct((query.shape[0], query.shape[2], query.shape[1], key.shape[1]), bool),
        *lax.stop_gradient((query, key, planes)),
        query_mask,
        key_mask,
        vmap_method="sequential",
    )


def sort_lsh_attention(
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    *,
    block_size: int = 256,
    min_length: int = 0,
    num_neighbors: int = 0,
    pairing: Pairing | None = None,
    is_causal: bool = False,
    query_mask: Mask = None,
    key_mask: Mask = None,
    scale: Scale = None,
    support: Array | np.ndarray | None = None,
) -> BranchOutput:
    """Computes the softmax over the support, which has no gradient; a given `support` overrules the options.

    MergeLSE of disjoint supports is the softmax over their union, so one softmax serves the causal form as well.
    """
    if support is None:
        sizes = {"block_size": block_size, "min_length": min_length, "num_neighbors": num_neighbors}
        options = {"pairing": pairing, "is_causal": is_causal, **sizes}
        support = _traced_support(query, key, planes, query_mask, key_mask, **options)
    return _softmax_attention(query, key, value, jnp.asarray(support), scale)


def causal_sort_lsh_recursive(
    query: Array, key: Array, value: Array, planes: Array, *, block_size: int = 256, min_length: int = 0, **options: Any
) -> BranchOutput:
    """Runs the recursion of Alg. "Causal sortLSH Sparse Exact Attention Branch", for T == S == N0 * 2^k, no masks.

    Its SortLSH is that of rank pairing; `options` are `num_neighbors` and `scale`.
    """
    base, n = min_length or block_size, query.shape[1]
    if n <= base:
        return exact_attention(query, key, value, is_causal=True, scale=options.get("scale"))
    causal_sparse = functools.partial(causal_sort_lsh_recursive, block_size=block_size, min_length=base, **options)
    past, future = slice(None, n // 2), slice(n // 2, None)
    top = causal_sparse(query[:, past], key[:, past], value[:, past], planes)
    diag = causal_sparse(query[:, future], key[:, future], value[:, future], planes)
    off = sort_lsh_attention(
        query[:, future], key[:, past], value[:, past], planes, block_size=block_size, pairing="rank", **options
    )
    bot = merge(diag, off)
    return BranchOutput(*(jnp.concatenate(parts, axis=1) for parts in zip(top, bot, strict=True)))


def soft_codes(x: Array, planes: Array, beta: Number = 1.0) -> Array:
    """Computes phi(x) of Alg. "RACE Low-Rank Attention Branch": softmax over r of beta tanh(W x) . v_r.

    x (..., H) with planes (L, P, H) gives (..., L, 2^P); x (..., K, H) with (K, L, P, H) gives (..., K, L, 2^P).
    v_r, a corner of {-1, 1}^P, has +1 at p where bit p of r is set.
    """
    num_bits = planes.shape[-2]
    corners = [[1.0 if r >> p & 1 else -1.0 for p in range(num_bits)] for r in range(2**num_bits)]
    equation = "...h,lph->...lp" if planes.ndim == 3 else "...kh,klph->...klp"
    projected = jnp.tanh(_einsum(equation, _float32(x), _float32(planes)))
    return jax.nn.softmax(_float32(beta) * _einsum("...p,rp->...r", projected, jnp.array(corners, jnp.float32)))


def race_attention(
    query: Array,
    key: Array,
    value: Array,
    planes: Array,
    *,
    beta: Number = 1.0,
    num_ensembles: int = 1,
    is_causal: bool = False,
    key_mask: Mask = None,
    chunk_size: int = 256,
    eps: float = 1e-6,
) -> BranchOutput:
    """Computes Alg. "RACE Low-Rank Attention Branch" and "Causal RACE ...", with the T x S kernel written out.

    Chunks are only a way to sum, so `chunk_size` plays no part. Ensemble e of M has the tables e L, ..., e L + L - 1.
    """
    del chunk_size
    num_heads = query.shape[2]
    if planes.ndim == 4:
        planes = _to_query_heads(planes, num_heads, axis=0)
    key, value = (_to_query_heads(_float32(x), num_heads, axis=2) for x in (key, value))
    phi_query, phi_key = soft_codes(query, planes, beta), soft_codes(key, planes, beta)
    allowed = _allowed(query, key, is_causal, key_mask)
    num_tables = planes.shape[-3] // num_ensembles
    branches = []
    for e in range(num_ensembles):
        tables = slice(e * num_tables, (e + 1) * num_tables)
        kernel = _einsum("btnlr,bsnlr->bnts", phi_query[..., tables, :], phi_key[..., tables, :]) / num_tables
        branches.append(_kernel_attention(jnp.where(allowed, kernel, 0.0), jnp.zeros((1, 1, 1, 1)), value, eps))
    out = jnp.mean(jnp.stack([branch.out for branch in branches]), axis=0)
    log_mass = _logsumexp(jnp.stack([branch.log_mass for branch in branches], axis=-1)) - math.log(num_ensembles)
    return BranchOutput(out.astype(query.dtype), log_mass)


def performer_attention(
    query: Array,
    key: Array,
    value: Array,
    projection: Array,
    *,
    is_causal: bool = False,
    key_mask: Mask = None,
    eps: float = 1e-6,
) -> BranchOutput:
    """Computes FAVOR+ with phi_f(x) = exp(w_f . x d^-1/4 - |x|^2 / (2 sqrt d)) / sqrt F, in log space.

    The projection is (F, H), shared by the heads, or (K, F, H).
    """
    num_heads, dim = query.shape[2:]
    key, value = (_to_query_heads(_float32(x), num_heads, axis=2) for x in (key, value))
    projection = _float32(projection)
    shared = projection.ndim == 2
    projection = projection if shared else _to_query_heads(projection, num_heads, axis=0)

    def log_phi(x: Array) -> Array:
        projected = _einsum("btnh,fh->bntf" if shared else "btnh,nfh->bntf", x, projection) * dim**-0.25
        norm = jnp.sum(x * x, axis=-1).swapaxes(1, 2)[..., None] / (2.0 * math.sqrt(dim))
        return projected - norm - 0.5 * math.log(projection.shape[-2])

    log_kernel = _logsumexp(log_phi(_float32(query))[:, :, :, None, :] + log_phi(key)[:, :, None, :, :])
    kernel, top = _exp_shifted(log_kernel, _allowed(query, key, is_causal, key_mask))
    out, log_mass = _kernel_attention(kernel, top, value, eps)
    return BranchOutput(out.astype(query.dtype), log_mass)


def merge(first: BranchOutput, second: BranchOutput) -> BranchOutput:
    """Computes MergeLSE of Alg. "Causal sortLSH ..." without its eps; two rows without keys give 0 and -inf."""
    masses = jnp.stack([first.log_mass, second.log_mass], axis=-1)
    weights, top = _exp_shifted(masses, ~jnp.isneginf(masses))
    total = jnp.sum(weights, axis=-1)
    out = _ratio(weights[..., :1] * _float32(first.out) + weights[..., 1:] * _float32(second.out), total)
    return BranchOutput(out.astype(first.out.dtype), top[..., 0] + _log(total))


def sparse_multiplier(
    sparse_log_mass: Array, low_rank_log_mass: Array, *, lam: Number = 1.0, eps: float = 1e-6
) -> Array:
    """Computes Eq. 5, m = d_sparse / (d_sparse + lam d_lr + eps), from the logarithms of the masses."""
    factor, floor = (jnp.broadcast_to(_float32(x), sparse_log_mass.shape) for x in (lam, eps))
    exponents = [sparse_log_mass, low_rank_log_mass, jnp.zeros_like(floor)]
    parts = _scaled_exp(exponents, [jnp.ones_like(factor), factor, floor])
    return _share(parts[0], parts)


def _scaled_exp(exponents: list[Array], factors: list[Array]) -> list[Array]:
    """Returns factor * exp(exponent) of each pair, all divided by the largest, so that nothing overflows.

    The factors stay outside of the exponent: a factor of 0 has a derivative.
    """
    logs = jnp.stack([x + _log(factor) for x, factor in zip(exponents, factors, strict=True)])
    top = lax.stop_gradient(jnp.max(logs, axis=0))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    return [factor * jnp.exp(jnp.minimum(x - top, 80.0)) for x, factor in zip(exponents, factors, strict=True)]


def _share(part: Array, parts: list[Array]) -> Array:
    """Returns part / sum(parts); 0, with gradient 0, where the sum is 0."""
    total = functools.reduce(jnp.add, parts)
    return jnp.where(total > 0, part / jnp.where(total > 0, total, 1.0), 0.0)


def fuse(
    sparse: BranchOutput,
    low_rank: BranchOutput,
    *,
    gate_sparse: Number = 1.0,
    gate_low_rank: Number = 1.0,
    lam: Number = 1.0,
    eps: float = 1e-6,
    kind: FusionKind = "elsaa",
    stop_gradient_mass: bool = True,
) -> Array:
    """Computes Eq. 6, O = g_s m O_s + g_lr O_lr, and its variants; gates and lam broadcast to (B, T, N)."""
    shape = sparse.log_mass.shape
    gate_sparse, gate_low_rank, lam = (jnp.broadcast_to(_float32(x), shape) for x in (gate_sparse, gate_low_rank, lam))
    out_sparse, out_low_rank = _float32(sparse.out), _float32(low_rank.out)
    masses = (sparse.log_mass, low_rank.log_mass)
    log_sparse, log_low_rank = lax.stop_gradient(masses) if stop_gradient_mass else masses
    multiplier = sparse_multiplier(log_sparse, log_low_rank, lam=lam, eps=eps)
    if kind == "elsaa":
        weight_sparse, weight_low_rank = gate_sparse * multiplier, gate_low_rank
    elif kind == "convex":
        weight_sparse, weight_low_rank = gate_sparse * multiplier, gate_low_rank * (1.0 - multiplier)
    elif kind == "sum":
        weight_sparse, weight_low_rank = gate_sparse, gate_low_rank
    elif kind == "lse":
        parts = _scaled_exp([log_sparse, log_low_rank], [gate_sparse, lam * gate_low_rank])
        weight_sparse, weight_low_rank = (_share(part, parts) for part in parts)
    else:
        raise ValueError(f"kind is {kind!r}; it must be 'elsaa', 'convex', 'sum' or 'lse'")
    out = weight_sparse[..., None] * out_sparse + weight_low_rank[..., None] * out_low_rank
    return out.astype(sparse.out.dtype)


def _per_key(branch: BranchOutput, seen: Array) -> BranchOutput:
    """Divides the mass of a branch by the number of keys that each query has seen, from `seen` (B, N or 1, T, S)."""
    num_keys = jnp.sum(seen, axis=-1).swapaxes(1, 2)
    mean = jnp.where(num_keys == 0, -jnp.inf, branch.log_mass - jnp.log(_float32(jnp.maximum(num_keys, 1))))
    return BranchOutput(branch.out, mean)


def elsaa_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    race_planes: Array,
    lsh_planes: Array | None = None,
    config: ElsaaConfig = _DEFAULT_CONFIG,
    lam: Number = 1.0,
    gate_sparse: Number = 1.0,
    gate_low_rank: Number = 1.0,
    is_causal: bool = False,
    query_mask: Mask = None,
    key_mask: Mask = None,
    scale: Scale = None,
    beta: Number | None = None,
    return_branches: bool = False,
) -> Array | tuple[Array, tuple[BranchOutput, BranchOutput]]:
    """Computes Alg. "ELSAA: Efficient Low-Rank and Sparse Approximation of Attention" or "Causal ELSAA ...".

    Without `lsh_planes` the sparse branch hashes with the first planes of the low-rank one, table after table.
    mass_scale "mean" divides each mass by the number of keys it sums over, also in the branches that are returned.
    """
    race, fusion = config.race, config.fusion
    if lsh_planes is None:
        all_planes = race_planes.reshape(*race_planes.shape[:-3], -1, race_planes.shape[-1])
        lsh_planes = all_planes[..., : config.sparse.num_bits, :]
    beta = race.beta if beta is None else beta
    options: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "eps": fusion.eps}
    low_rank = race_attention(query, key, value, race_planes, beta=beta, num_ensembles=race.num_ensembles, **options)
    if config.sparse.min_length == "auto":
        raise ValueError("SortLshConfig.min_length is 'auto', which is a choice by speed; here it must be a number")
    options = {name: getattr(config.sparse, name) for name in ("block_size", "min_length", "num_neighbors", "pairing")}
    support = _traced_support(query, key, lsh_planes, query_mask, key_mask, is_causal=is_causal, **options)
    sparse = sort_lsh_attention(query, key, value, lsh_planes, scale=scale, support=support)
    if fusion.mass_scale == "mean":
        sparse, low_rank = _per_key(sparse, support), _per_key(low_rank, _allowed(query, key, is_causal, key_mask))
    out = fuse(
        sparse,
        low_rank,
        gate_sparse=gate_sparse,
        gate_low_rank=gate_low_rank,
        lam=lam,
        eps=fusion.eps,
        kind=fusion.kind,
        stop_gradient_mass=fusion.stop_gradient_mass,
    )
    return (out, (sparse, low_rank)) if return_branches else out
