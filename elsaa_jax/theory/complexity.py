"""How much work attention is: by the paper's formulas, and counted from the plans and programs of the library.

An interaction is a query that reads one key, or one bucket. It costs 2 H multiply-adds: H for a logit (or for writing a
value into a bucket) and H for the weighted value (or for reading it). So counts of interactions and of multiply-adds
can be compared: those of a program divided by 2 H are its interactions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from elsaa_jax.blocks.stretches import Stretches
from elsaa_jax.checks import check_call, check_int
from elsaa_jax.config import RaceConfig, SortLshConfig
from elsaa_jax.dispatch import XLA
from elsaa_jax.sparse.call import SparseCall
from elsaa_jax.sparse.full import full_plan
from elsaa_jax.sparse.levels import causal_plan
from elsaa_jax.sparse.sort_lsh import gray_ranks, make_sparse
from elsaa_jax.types import Array, TilePlan


class Interactions(NamedTuple):
    """Interactions of one head by the paper's section on complexity: exact N^2, sparse N (2r + 1) s, RACE N L 2^P."""

    exact: int
    sparse: int
    low_rank: int

    @property
    def elsaa(self) -> int:
        """Those of both branches."""
        return self.sparse + self.low_rank


def paper_interactions(length: int, race: RaceConfig, sparse: SortLshConfig) -> Interactions:
    """The paper's counts, for attention that is not causal."""
    check_int("length", length, 1)
    width = (2 * sparse.num_neighbors + 1) * sparse.block_size
    return Interactions(length**2, length * width, length * race.total_tables * 2**race.num_bits)


class Scores(NamedTuple):
    """Pairs of a query and a key in the sparse branch of one head.

    Attributes:
      attended: pairs that enter the softmax.
      in_tiles: entries of the tiles that hold a query, those that pad them included; exact stretches are not counted.
    """

    attended: int
    in_tiles: int


def count_scores(query: Array, key: Array, planes: Array, config: SortLshConfig, *, is_causal: bool = False) -> Scores:
    """The sparse branch's pairs, counted from the plan that `sort_lsh_attention` follows for these arrays.

    Args:
      query: (1, T, 1, H).
      key: (1, S, 1, H).
      planes: (P, H).
      config: of the branch; its `num_bits` is that of the planes.
      is_causal: counts the stretches and every level of the causal split.
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
    plan = _plan(call, *gray_ranks(query, key, planes), None, None)
    scores = _scores_of_plan(plan, facts.num_queries, facts.num_keys)
    return Scores(exact + scores.attended, scores.in_tiles)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _plan(call: SparseCall, *arguments: Any) -> TilePlan:
    return (causal_plan if call.facts.is_causal else full_plan)(call, *arguments)


def _scores_of_plan(plan: TilePlan, num_queries: int, num_keys: int) -> Scores:
    """Counts of a plan of one head; an index past the end is no row, and no block."""
    queries = np.sum(np.asarray(plan.query_rows) < num_queries, axis=-1, dtype=np.int64)
    keys = np.sum(np.asarray(plan.key_rows) < num_keys, axis=-1, dtype=np.int64)
    if plan.blocks is not None:
        blocks = np.asarray(plan.blocks)
        padded = np.pad(keys, [(0, 0), (0, 1)])
        keys = np.take_along_axis(padded[:, None, :], np.minimum(blocks, keys.shape[1]), axis=2).sum(-1)
    width = plan.key_rows.shape[-1] * (1 if plan.blocks is None else plan.blocks.shape[-1])
    in_tiles = int(np.count_nonzero(queries)) * plan.query_rows.shape[-1] * width
    return Scores(int(np.sum(queries * keys)), in_tiles)


def count_multiply_adds(function: Callable[..., Any], *arguments: Any) -> int:
    """Multiply-adds of all matrix products in the traced program of `function`; nothing is run.

    Loops count as often as they run; of two branches the dearer one counts. A loop whose length depends on data is
    refused: its work cannot be read from the program.

    Args:
      function: of arrays.
      *arguments: arrays, or `jax.ShapeDtypeStruct`.
    """
    return _products(jax.make_jaxpr(function)(*arguments))


def _products(program: Any) -> int:
    total = 0
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            total += _product(equation)
            continue
        inner = [_products(program) for program in _programs(equation.params)]
        match equation.primitive.name:
            case "while" if any(inner):
                raise ValueError("the program has a loop whose length depends on data; its work cannot be counted")
            case "cond":
                total += max(inner)
            case "scan":
                total += equation.params["length"] * sum(inner)
            case _:
                total += sum(inner)
    return total


def _programs(params: dict[str, Any]) -> list[Any]:
    """The programs within an operation: bodies of loops, branches, inner functions."""
    return [x for x in jax.tree.leaves(params) if hasattr(x, "eqns")]


def _product(equation: Any) -> int:
    """Batch x rows x columns x contracted of a dot_general."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
