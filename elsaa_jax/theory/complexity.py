"""The work of attention: interactions by the paper's formulas, and counted from the plans of the library.

An interaction is a query that reads one key, or one bucket. It costs 2 H multiply-adds: H for a logit (or for writing a
value into a bucket) and H for the weighted value (or for reading it). So the multiply-adds of a program divided by 2 H
can be compared with counts of interactions.

The formulas for parameters, hashing, sorting and memory are in `elsaa_jax.theory.costs`, and the counts from traced
programs in `elsaa_jax.theory.programs`. All of them can be imported from here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from elsaa_jax.blocks.stretches import Stretches
from elsaa_jax.checks import check_call, check_int
from elsaa_jax.config import RaceConfig, SortLshConfig
from elsaa_jax.dispatch import XLA
from elsaa_jax.sparse.sort_lsh import make_plan, make_sparse
from elsaa_jax.theory.costs import (
    Hashing,
    Memory,
    Parameters,
    hashing_work,
    kept_memory,
    keys_read,
    layer_parameters,
)
from elsaa_jax.theory.programs import (
    count_kept_bytes,
    count_multiply_adds,
    count_parameters,
    count_sorted_tokens,
    count_temporary_bytes,
)
from elsaa_jax.types import Array, TilePlan

__all__ = [
    "Hashing",
    "Interactions",
    "Memory",
    "Parameters",
    "Scores",
    "count_kept_bytes",
    "count_multiply_adds",
    "count_parameters",
    "count_scores",
    "count_sorted_tokens",
    "count_temporary_bytes",
    "hashing_work",
    "kept_memory",
    "keys_read",
    "layer_parameters",
    "paper_interactions",
]


class Interactions(NamedTuple):
    """Interactions of one head by the paper's section on complexity.

    Attributes:
      exact: N^2, of exact attention.
      sparse: N (2 r + 1) s, with blocks of s keys and r neighbours on each side.
      low_rank: N M L 2^P, of RACE.
    """

    exact: int
    sparse: int
    low_rank: int

    @property
    def elsaa(self) -> int:
        """Interactions of both branches."""
        return self.sparse + self.low_rank


def paper_interactions(length: int, race: RaceConfig, sparse: SortLshConfig) -> Interactions:
    """Computes the paper's numbers of interactions for non-causal attention of one head.

    Args:
      length: Number of tokens, N.
      race: Low-rank branch.
      sparse: Sparse branch.

    Example:
      >>> from elsaa_jax import RaceConfig, SortLshConfig
      >>> from elsaa_jax.theory import complexity
      >>> race, sparse = RaceConfig(num_tables=4, num_bits=4), SortLshConfig(block_size=256)
      >>> counts = complexity.paper_interactions(32_000, race, sparse)
      >>> counts.elsaa, counts.elsaa / counts.exact
      (10240000, 0.01)
    """
    check_int("length", length, 1)
    length = int(length)
    width = (2 * sparse.num_neighbors + 1) * sparse.block_size
    return Interactions(length**2, length * width, length * race.total_tables * 2**race.num_bits)


class Scores(NamedTuple):
    """Pairs of a query and a key in the sparse branch of one head.

    Attributes:
      attended: Pairs that enter the softmax.
      in_tiles: Entries of the tiles that hold a query, including those that pad them. The exact stretches of the causal
        split are not included.
    """

    attended: int
    in_tiles: int


def count_scores(query: Array, key: Array, planes: Array, config: SortLshConfig, *, is_causal: bool = False) -> Scores:
    """Counts the pairs of the sparse branch from the plan that `sort_lsh_attention` follows for these arrays.

    Args:
      query: Queries of one head, (1, T, 1, H).
      key: Keys of one head, (1, S, 1, H).
      planes: Hash planes, (P, H).
      config: Sparse branch. Its `num_bits` is not used: the planes have their own number.
      is_causal: Whether attention is causal. The stretches and every level of the causal split are counted then.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax
      >>> from elsaa_jax import SortLshConfig
      >>> from elsaa_jax.theory import complexity
      >>> tokens = jax.random.normal(jax.random.key(0), (1, 64, 1, 8))
      >>> complexity.count_scores(tokens, tokens, jnp.eye(8)[:3], SortLshConfig(block_size=16)).attended
      1024
    """
    for name, x in (("query", query), ("key", key)):
        if x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != 1:
            raise ValueError(
                f"{name} has shape {x.shape}; it must be (1, length, 1, head_dim): one head of one example"
            )
    facts = check_call(query, key, key, is_causal=is_causal)
    call = make_sparse(facts, config, True, XLA)
    exact = 0
    if is_causal or facts.num_keys <= call.base:
        stretches = Stretches(min(call.base, facts.num_keys), facts.num_queries, facts.num_keys, is_causal)
        exact = int(np.asarray(stretches.count_keys(query, None), np.float64).sum())
    if facts.num_keys <= call.base:
        return Scores(exact, 0)
    plan = _plan(call, query, key, planes, None, None)
    scores = _scores_of_plan(plan, facts.num_queries, facts.num_keys)
    return Scores(exact + scores.attended, scores.in_tiles)


_plan = jax.jit(make_plan, static_argnums=0)


def _scores_of_plan(plan: TilePlan, num_queries: int, num_keys: int) -> Scores:
    """Counts the pairs of a plan of one head. An index past the end is padding."""
    queries = np.sum(np.asarray(plan.query_rows) < num_queries, axis=-1, dtype=np.int64)
    keys = np.sum(np.asarray(plan.key_rows) < num_keys, axis=-1, dtype=np.int64)
    if plan.blocks is not None:
        blocks = np.asarray(plan.blocks)
        padded = np.pad(keys, [(0, 0), (0, 1)])
        keys = np.take_along_axis(padded[:, None, :], np.minimum(blocks, keys.shape[1]), axis=2).sum(-1)
    width = plan.key_rows.shape[-1] * (1 if plan.blocks is None else plan.blocks.shape[-1])
    in_tiles = int(np.count_nonzero(queries)) * plan.query_rows.shape[-1] * width
    return Scores(int(np.sum(queries * keys)), in_tiles)
