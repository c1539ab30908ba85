"""The definitions once more, in float64 NumPy, sharing no code with the library.

Each takes float64 arrays and a boolean matrix `allowed` (B, N, T, S) of who attends to whom, and
returns (out (B, T, N, H), log_mass (B, T, N)).
"""

import numpy as np


def repeat_heads(x, num_heads):
    return np.repeat(x, num_heads // x.shape[2], axis=2)


def allowed_pairs(shape, num_keys, is_causal, key_mask):
    batch, num_queries, num_heads, _ = shape
    allowed = np.ones((batch, num_heads, num_queries, num_keys), bool)
    if is_causal:
        allowed &= np.arange(num_keys)[None, :] <= np.arange(num_queries)[:, None] + num_keys - num_queries
    if key_mask is not None:
        allowed &= np.asarray(key_mask)[:, None, None, :]
    return allowed


def kernel_attention(log_kernel, value, allowed, eps):
    kernel = np.where(allowed, np.exp(log_kernel), 0.0)
    den = kernel.sum(-1)
    num = np.einsum("bnts,bsnh->btnh", kernel, repeat_heads(value, kernel.shape[1]))
    den = den.swapaxes(1, 2)
    with np.errstate(divide="ignore"):
        return num / np.where(den + eps == 0, 1.0, den + eps)[..., None], np.log(den)


def softmax_attention(query, key, value, allowed):
    key = repeat_heads(key, query.shape[2])
    logits = np.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return kernel_attention(logits, value, allowed, 0.0)


def soft_codes(x, planes, beta):
    """x (B, T, N, H), planes (N, L, P, H) -> (B, T, N, L, 2**P)."""
    bits = planes.shape[2]
    corners = np.array([[1.0 if r >> p & 1 else -1.0 for p in range(bits)] for r in range(2**bits)])
    weights = np.exp(beta * np.einsum("btnlp,rp->btnlr", np.tanh(np.einsum("btnh,nlph->btnlp", x, planes)), corners))
    return weights / weights.sum(-1, keepdims=True)


def race_attention(query, key, value, planes, allowed, *, beta, num_ensembles, eps=1e-6):
    num_heads = query.shape[2]
    planes = np.broadcast_to(planes, (num_heads, *planes.shape)) if planes.ndim == 3 else planes
    planes = np.repeat(planes, num_heads // planes.shape[0], axis=0)
    query_codes = soft_codes(query, planes, beta)
    key_codes = soft_codes(repeat_heads(key, num_heads), planes, beta)
    outs, dens = [], []
    for tables in np.split(np.arange(planes.shape[1]), num_ensembles):
        kernel = np.einsum("btnlr,bsnlr->bnts", query_codes[:, :, :, tables], key_codes[:, :, :, tables]) / len(tables)
        out, log_mass = kernel_attention(np.log(kernel), value, allowed, eps)
        outs.append(out)
        dens.append(np.exp(log_mass))
    with np.errstate(divide="ignore"):
        return np.mean(outs, axis=0), np.log(np.mean(dens, axis=0))


def performer_attention(query, key, value, projection, allowed, *, eps=1e-6):
    head_dim = query.shape[-1]

    def features(x):
        exponent = np.einsum("btnh,fh->btnf", x * head_dim**-0.25, projection)
        return np.exp(exponent - (x**2).sum(-1, keepdims=True) / (2 * head_dim**0.5)) / len(projection) ** 0.5

    kernel = np.einsum("btnf,bsnf->bnts", features(query), features(repeat_heads(key, query.shape[2])))
    return kernel_attention(np.log(kernel), value, allowed, eps)
