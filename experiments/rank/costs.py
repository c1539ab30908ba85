"""Costs beside the interactions: parameters, hashing, sorting, memory and keys read, by formula and by count."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import elsaa_jax
from elsaa_jax import ELSAA, ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from elsaa_jax.theory import complexity
from elsaa_jax.types import Array
from experiments.engine.results import Rows

# The layer of the paper's long-text experiments.
FEATURES, NUM_HEADS = 256, 4
LENGTH, HEAD_DIM = 32_768, 64
RACE = RaceConfig(num_tables=4, num_bits=4)
SPARSE = SortLshConfig(num_bits=5, block_size=256)
CONFIG = ElsaaConfig(RACE, SPARSE)
POSITIONS = (4096, 32_767)


def cost_rows(seed: int) -> Rows:
    """Returns one row for each cost: its formula evaluated, and the same number counted from the library."""
    return [*parameter_rows(), *hashing_rows(), *memory_rows(), *reading_rows(seed)]


def parameter_rows() -> Rows:
    """Compares the formulas for parameters with the parameters that the linen layer creates."""
    rows = []
    for name, fusion in {
        "scalar lambda": FusionConfig(gate_hidden=64),
        "query lambda": FusionConfig(gate_hidden=64, lambda_kind="query"),
    }.items():
        config = ElsaaConfig(RACE, SPARSE, fusion)
        formula = complexity.layer_parameters(FEATURES, NUM_HEADS, config, use_bias=False)
        layer = ELSAA(num_heads=NUM_HEADS, config=config, use_bias=False)
        keys = {"params": jax.random.key(0), "hashes": jax.random.key(1)}
        found = jax.eval_shape(layer.init, keys, jnp.ones((1, 8, FEATURES)))["params"]
        projections = complexity.count_parameters([found[x] for x in ("query", "key", "value", "out")])
        extra = complexity.count_parameters(found) - projections
        rows.append(_row(f"parameters of the projections, {name}", formula.projections, projections))
        note = f"{extra / projections:.1%} of the projections"
        rows.append(_row(f"parameters of gate, lambda and beta, {name}", formula.extra, extra, note))
    return rows


def hashing_rows() -> Rows:
    """Compares the formulas for hashing and sorting with the traced programs of the branches."""
    work = complexity.hashing_work(LENGTH, LENGTH, HEAD_DIM, RACE, SPARSE)
    buckets = complexity.paper_interactions(LENGTH, RACE, SPARSE)
    shapes = _shapes()
    sparse = complexity.count_multiply_adds(_sparse(False), *shapes) - 2 * HEAD_DIM * buckets.sparse
    low_rank = complexity.count_multiply_adds(_low_rank(False), *shapes) - 2 * HEAD_DIM * buckets.low_rank
    rows = [
        _row("multiply-adds of the hard codes", work.hard_codes, sparse),
        _row("multiply-adds of the soft codes", work.soft_planes + work.soft_corners, low_rank),
    ]
    for is_causal in (False, True):
        found = complexity.count_sorted_tokens(_sparse(is_causal), *shapes)
        rows.append(_row(f"sorted tokens{_causal(is_causal)}", work.sorted_tokens, found))
    return rows


def memory_rows() -> Rows:
    """Compares the formulas for kept memory with the residuals of the traced programs, and adds temporary memory.

    Inputs and constants (hash planes, beta and eps) are left out.
    """
    shapes = _shapes()
    rows = []
    for is_causal in (False, True):
        memory = complexity.kept_memory(LENGTH, HEAD_DIM, CONFIG, is_causal=is_causal)
        name = _causal(is_causal)
        for title, formula, function in (
            ("the sparse branch", memory.sparse_rows + memory.sparse_plan, _sparse(is_causal)),
            ("the low-rank branch", memory.race_state + memory.race_rows, _low_rank(is_causal)),
            ("both branches", memory.total - memory.inputs, _elsaa(is_causal)),
        ):
            constants = 0 if title == "the sparse branch" else 4 * (RACE.total_planes * HEAD_DIM + 2)
            found = complexity.count_kept_bytes(function, *shapes) - memory.inputs - constants
            rows.append(_row(f"kept bytes of {title}{name}", formula, found))
            temporary = complexity.count_temporary_bytes(function, *shapes)
            rows.append(_row(f"temporary bytes of {title}{name}", None, temporary))
    return rows


def reading_rows(seed: int) -> Rows:
    """Compares the formula for the keys of one causal query with the plan of a call with that query alone."""
    config = SortLshConfig(num_bits=5, block_size=256, min_length=256)
    rngs = jax.random.split(jax.random.key(seed), 3)
    planes = elsaa_jax.sample_planes(rngs[0], (config.num_bits, HEAD_DIM))
    rows = []
    for position in POSITIONS:
        query = jax.random.normal(rngs[1], (1, 1, 1, HEAD_DIM))
        key = jax.random.normal(rngs[2], (1, position + 1, 1, HEAD_DIM))
        found = complexity.count_scores(query, key, planes, config, is_causal=True).attended
        rows.append(_row(f"keys read by the query at {position:,}", complexity.keys_read(position, config), found))
    return rows


def _row(cost: str, formula: int | None, counted: int, note: str = "") -> dict[str, Any]:
    return {"cost": cost, "formula": formula, "counted": counted, "note": note}


def _shapes() -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((1, LENGTH, 1, HEAD_DIM), jnp.float32)] * 3


def _causal(is_causal: bool) -> str:
    return ", causal" if is_causal else ""


def _sparse(is_causal: bool) -> Any:
    planes = jnp.ones((SPARSE.num_bits, HEAD_DIM))

    def attend(query: Array, key: Array, value: Array) -> Any:
        options: dict[str, Any] = {"block_size": SPARSE.block_size, "is_causal": is_causal, "implementation": "xla"}
        return elsaa_jax.sort_lsh_attention(query, key, value, planes, **options)

    return attend


def _low_rank(is_causal: bool) -> Any:
    planes = jnp.ones((RACE.num_tables, RACE.num_bits, HEAD_DIM))

    def attend(*qkv: Array) -> Any:
        return elsaa_jax.race_attention(*qkv, planes, is_causal=is_causal, implementation="xla")

    return attend


def _elsaa(is_causal: bool) -> Any:
    planes = jnp.ones((RACE.num_tables, RACE.num_bits, HEAD_DIM))

    def attend(*qkv: Array) -> Any:
        options: dict[str, Any] = {"config": CONFIG, "is_causal": is_causal, "implementation": "xla"}
        return elsaa_jax.elsaa_attention(*qkv, race_planes=planes, **options)

    return attend
