"""The example of the paper's appendix on complexity, by its formulas and counted from plans and programs."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import jax
import jax.numpy as jnp

import elsaa_jax
from elsaa_jax import ElsaaConfig, RaceConfig, SortLshConfig
from elsaa_jax.theory import complexity
from elsaa_jax.types import Array, Pairing

LENGTH, HEAD_DIM = 32_000, 64
CONFIG = ElsaaConfig(RaceConfig(num_tables=4, num_bits=4), SortLshConfig(num_bits=5, block_size=256, min_length=4096))
# Base lengths N0 of the causal split: one block, and the one that the authors' code has for 32,000 tokens.
CAUSAL_BASES = (256, 2048)


def count_interactions(seed: int) -> list[dict[str, Any]]:
    """Counts the interactions of the example by formulas, by plans of the sparse branch and by traced programs.

    Args:
      seed: Random seed of the tokens and the hash planes.
    """
    n, head_dim = LENGTH, HEAD_DIM
    paper = complexity.paper_interactions(n, CONFIG.race, CONFIG.sparse)
    rngs = jax.random.split(jax.random.key(seed), 4)
    query, key = (jax.random.normal(rng, (1, n, 1, head_dim)) for rng in rngs[:2])
    race_planes = elsaa_jax.sample_planes(rngs[2], (CONFIG.race.num_tables, CONFIG.race.num_bits, head_dim))
    lsh_planes = elsaa_jax.sample_planes(rngs[3], (CONFIG.sparse.num_bits, head_dim))
    shapes = [jax.ShapeDtypeStruct((1, n, 1, head_dim), jnp.float32)] * 3

    def traced(function: Any, *arrays: Array, **options: Any) -> float:
        def attend(*qkv: Array) -> Any:
            return function(*qkv, *arrays, **options, implementation="xla")

        return complexity.count_multiply_adds(attend, *shapes) / (2 * head_dim)

    def race(is_causal: bool) -> float:
        return traced(elsaa_jax.race_attention, race_planes, is_causal=is_causal)

    exact = traced(elsaa_jax.exact_attention)
    sparse = traced(elsaa_jax.sort_lsh_attention, lsh_planes, block_size=CONFIG.sparse.block_size)
    elsaa = traced(elsaa_jax.elsaa_attention, race_planes=race_planes, lsh_planes=lsh_planes, config=CONFIG)

    scores = complexity.count_scores(query, key, lsh_planes, CONFIG.sparse)
    rows: list[dict[str, Any]] = [
        {"method": "exact", "paper": paper.exact, "counted": None, "traced": exact},
        {"method": "sparse", "paper": paper.sparse, "counted": scores.attended, "traced": sparse},
        {"method": "low rank", "paper": paper.low_rank, "counted": None, "traced": race(False)},
        {"method": "elsaa", "paper": paper.elsaa, "counted": None, "traced": elsaa},
    ]
    rows = [{**row, "of": n * n} for row in rows]
    causal = n * (n + 1) // 2
    rows.append({"method": "low rank, causal", "paper": None, "counted": None, "traced": race(True), "of": causal})
    for base, pairing in itertools.product(CAUSAL_BASES, get_args(Pairing)):
        config = SortLshConfig(CONFIG.sparse.num_bits, CONFIG.sparse.block_size, base, 0, pairing)
        scores = complexity.count_scores(query, key, lsh_planes, config, is_causal=True)
        row = {"method": f"sparse, causal, N0 = {base:,}, {pairing}", "paper": None, "traced": None}
        rows.append({**row, "counted": scores.attended, "in_tiles": scores.in_tiles, "of": causal})
    return rows
