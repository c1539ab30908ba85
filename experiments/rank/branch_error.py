"""Bias and variance of fused attention against exact attention, over the entropy of the attention.

The paper leaves this question to future work. Queries, keys and values are fixed, and the hash planes are random. The
bias of an output is the squared distance of its mean over draws of the planes from exact attention; its variance is the
spread around that mean. Both are divided by the mean square of the exact output. A factor called the temperature
multiplies the queries: the larger it is, the sharper the attention.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

import elsaa_jax
from elsaa_jax import BranchOutput
from elsaa_jax.config import FUSION_KINDS
from elsaa_jax.types import Array, FusionKind
from experiments.engine.stats import mean_interval

TEMPERATURES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
LAMBDAS = tuple(4.0**power for power in range(-4, 13))


class Setting(NamedTuple):
    """Sizes of the experiment.

    Attributes:
      length: Number of tokens.
      head_dim: Head dimension.
      block_size: Keys of a block of the sparse branch.
      num_bits: Bits of the hash of the sparse branch.
      race_tables: Tables of the low-rank branch.
      race_bits: Bits of each table.
      draws: Draws of the hash planes for each set of tokens.
      similarity: Approximate cosine of a query and its key.
    """

    length: int = 1024
    head_dim: int = 32
    block_size: int = 64
    num_bits: int = 5
    race_tables: int = 4
    race_bits: int = 4
    draws: int = 16
    similarity: float = 0.0


class Problem(NamedTuple):
    """One set of tokens with its exact attention.

    Attributes:
      query: Queries, (n, H).
      key: Keys, (n, H).
      value: Values, (n, H).
      out: Output of exact attention, (n, H).
      log_mass: Logarithm of its denominators, (n,).
      entropy: Mean entropy of a row of the attention, in nats.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    out: np.ndarray
    log_mass: np.ndarray
    entropy: float


def make_problem(setting: Setting, temperature: float, seed: int) -> Problem:
    """Draws normal tokens. Query i is `temperature` times a mixture of key i and noise."""
    rng = np.random.default_rng([seed, 6])
    key, value, noise = rng.normal(size=(3, setting.length, setting.head_dim))
    mixed = setting.similarity * key + np.sqrt(1 - setting.similarity**2) * noise
    query = temperature * mixed
    logits = query @ key.T / np.sqrt(setting.head_dim)
    log_mass = logsumexp(logits, axis=1)
    weights = np.exp(logits - log_mass[:, None])
    entropy = float(np.mean(log_mass - np.sum(weights * logits, axis=1)))
    return Problem(query, key, value, weights @ value, log_mass, entropy)


@functools.partial(jax.jit, static_argnums=0)
def run_branches(setting: Setting, rng: Array, tokens: Array) -> tuple[BranchOutput, BranchOutput]:
    """Runs both branches for `draws` draws of the planes, which take the place of the heads."""
    draws = setting.draws
    query, key, value = (jnp.repeat(x[None, :, None], draws, axis=2) for x in tokens)
    race_rng, lsh_rng = jax.random.split(rng)
    race_planes = (draws, setting.race_tables, setting.race_bits, setting.head_dim)
    lsh_planes = elsaa_jax.sample_planes(lsh_rng, (draws, setting.num_bits, setting.head_dim))
    sparse = elsaa_jax.sort_lsh_attention(query, key, value, lsh_planes, block_size=setting.block_size)
    low_rank = elsaa_jax.race_attention(query, key, value, elsaa_jax.sample_planes(race_rng, race_planes))
    return sparse, low_rank


@functools.partial(jax.jit, static_argnames="kind")
def fuse(sparse: BranchOutput, low_rank: BranchOutput, lam: Array, kind: FusionKind) -> Array:
    """Fuses the branches by `elsaa_jax.fuse` with gates 1."""
    return elsaa_jax.fuse(sparse, low_rank, lam=lam, kind=kind)


class Error(NamedTuple):
    """Relative squared error, which is the sum of its bias and its variance.

    Attributes:
      error: Mean squared difference from exact attention, relative to the mean square of exact attention.
      bias: Part of the error that remains in the mean over draws.
      variance: Part of the error that varies between draws.
    """

    error: float
    bias: float
    variance: float


def error_of(outputs: np.ndarray, exact: np.ndarray) -> Error:
    """Computes the error of outputs (draws, n, H) against exact attention (n, H).

    The squared distance of the mean over D draws from the truth is too large by variance / D on average. This is
    subtracted from the bias, so that neither part depends on the number of draws.
    """
    outputs = np.asarray(outputs, np.float64)
    draws, power = len(outputs), np.mean(exact**2)
    error = np.mean((outputs - exact) ** 2) / power
    variance = np.mean(np.var(outputs, axis=0, ddof=1)) / power
    bias = np.mean((outputs.mean(axis=0) - exact) ** 2) / power - variance / draws
    return Error(float(error), float(bias), float(error - bias))


def fitted_gates(first: np.ndarray, second: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Returns g_1 first + g_2 second for the two numbers g that bring it nearest to exact attention."""
    columns = np.stack([first.ravel(), second.ravel()], axis=1)
    gates, *_ = np.linalg.lstsq(columns, np.broadcast_to(exact, first.shape).ravel(), rcond=None)
    return gates[0] * first + gates[1] * second


def measure(setting: Setting, temperature: float, seed: int) -> dict[str, Any]:
    """Measures the errors of all estimators for one set of tokens, and the quantities that explain them."""
    problem = make_problem(setting, temperature, seed)
    tokens = jnp.asarray(np.stack(problem[:3]), jnp.float32)
    sparse, low_rank = run_branches(setting, jax.random.key(seed), tokens)

    def per_draw(out: Array) -> np.ndarray:
        return np.asarray(out, np.float64)[0].swapaxes(0, 1)

    def fused(kind: FusionKind, lam: float) -> Error:
        return error_of(per_draw(fuse(sparse, low_rank, jnp.float32(lam), kind)), problem.out)

    first, second = per_draw(sparse.out), per_draw(low_rank.out)
    multiplier = per_draw(elsaa_jax.sparse_multiplier(sparse.log_mass, low_rank.log_mass))
    coverage = np.exp(per_draw(sparse.log_mass) - problem.log_mass)
    errors = {"sparse": error_of(first, problem.out), "low_rank": error_of(second, problem.out)}
    errors |= {kind: fused(kind, 1.0) for kind in FUSION_KINDS}
    errors["sum, fitted gates"] = error_of(fitted_gates(first, second, problem.out), problem.out)
    scaled = multiplier[..., None] * first
    errors["elsaa, fitted gates"] = error_of(fitted_gates(scaled, second, problem.out), problem.out)
    # The weight that m estimates, from the mass of exact attention, which is known here.
    share = coverage[..., None]
    errors["convex, true share"] = error_of(share * first + (1 - share) * second, problem.out)
    by_lambda = {lam: fused("lse", lam) for lam in LAMBDAS}
    best = min(by_lambda, key=lambda lam: by_lambda[lam].error)
    errors["lse, best lambda"] = by_lambda[best]
    explained = {"coverage": float(coverage.mean()), "multiplier": float(multiplier.mean()), "best_lambda": best}
    return {"entropy": problem.entropy, **explained, "errors": errors}


def error_rows(setting: Setting, temperatures: Sequence[float], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields a row for each temperature and estimator: means over the seeds, with a 95 % interval."""
    for temperature in temperatures:
        measured = [measure(setting, temperature, seed) for seed in seeds]
        names = ("entropy", "coverage", "multiplier", "best_lambda")
        shared = {name: float(np.mean([one[name] for one in measured])) for name in names}
        for method in measured[0]["errors"]:
            parts = np.array([one["errors"][method] for one in measured])
            mean, low, high = mean_interval(parts[:, 0])
            row = {"similarity": setting.similarity, "temperature": temperature, **shared, "method": method}
            interval = {"error": mean, "low": low, "high": high}
            yield {**row, **interval, "bias": float(parts[:, 1].mean()), "variance": float(parts[:, 2].mean())}
