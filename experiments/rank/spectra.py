"""The attention of one head as a matrix, taken from the library and built by the theory, and its rank over length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

import elsaa_jax
from elsaa_jax import ElsaaConfig, RaceConfig, SortLshConfig, theory
from elsaa_jax.config import FUSION_KINDS
from elsaa_jax.types import Array, Pairing

HEAD_DIM = 16
RACE = RaceConfig(num_tables=4, num_bits=4)
SPARSE = SortLshConfig(num_bits=5, block_size=16)


class Tokens(NamedTuple):
    """Tokens and hash planes of one head, in float32 like the inputs of the library.

    Attributes:
      query: Queries, (n, H).
      key: Keys, (n, H).
      race_planes: Planes of the low-rank branch, (L, P, H).
      lsh_planes: Planes of the sparse branch, (P, H).
    """

    query: np.ndarray
    key: np.ndarray
    race_planes: np.ndarray
    lsh_planes: np.ndarray


class Form(NamedTuple):
    """A form of the sparse branch.

    Attributes:
      pairing: "rank" or "bucket".
      num_neighbors: Further blocks on each side.
      is_causal: Whether attention is causal.
    """

    pairing: Pairing
    num_neighbors: int
    is_causal: bool

    def __str__(self) -> str:
        causal = ", causal" if self.is_causal else ""
        return f"{self.pairing}, {self.num_neighbors} neighbours{causal}"


FORMS = tuple(
    Form(pairing, num_neighbors, is_causal)
    for is_causal, pairing, num_neighbors in itertools.product((False, True), get_args(Pairing), (0, 1))
)


def draw_tokens(seed: int, length: int, vocabulary: int | None = None) -> Tokens:
    """Draws normal queries, keys and planes. With a vocabulary, that many different tokens stand at random places."""
    rng = np.random.default_rng([seed, length])
    query, key = rng.normal(size=(2, vocabulary or length, HEAD_DIM)).astype(np.float32)
    words = rng.integers(0, vocabulary, length) if vocabulary else np.arange(length)
    race_planes = rng.normal(size=(RACE.num_tables, RACE.num_bits, HEAD_DIM))
    lsh_planes = rng.normal(size=(SPARSE.num_bits, HEAD_DIM))
    return Tokens(query[words], key[words], race_planes.astype(np.float32), lsh_planes.astype(np.float32))


def materialize(attend: Callable[[Array, Array, Array], Any], query: np.ndarray, key: np.ndarray) -> Any:
    """Computes the matrices (T, S) that `attend` applies to its values, as its outputs for the identity.

    Values are as wide as keys, so that each batch entry holds H columns of the identity.

    Args:
      attend: Function from query (B, T, 1, H), key and value (B, S, 1, H) to a tree of outputs (B, T, 1, H).
      query: Queries, (T, H).
      key: Keys, (S, H).

    Returns:
      The tree with float64 matrices (T, S) instead of outputs.
    """
    length, head_dim = key.shape
    parts = -(-length // head_dim)
    identity = np.eye(length, parts * head_dim, dtype=np.float32)
    value = identity.reshape(length, parts, 1, head_dim).swapaxes(0, 1)
    repeated = (np.broadcast_to(x, (parts, *x.shape))[:, :, None] for x in (query, key))
    outputs = attend(*map(jnp.asarray, repeated), jnp.asarray(value))

    def matrix(out: Array) -> np.ndarray:
        return np.asarray(out, np.float64)[:, :, 0].swapaxes(0, 1).reshape(len(query), -1)[:, :length]

    return jax.tree.map(matrix, outputs)


def library_operators(tokens: Tokens, form: Form) -> dict[str, np.ndarray]:
    """Returns the matrices of both branches and of every kind of fusion, from `elsaa_attention` and `fuse`."""
    sparse = SortLshConfig(SPARSE.num_bits, SPARSE.block_size, 0, form.num_neighbors, form.pairing)
    race_planes, lsh_planes = jnp.asarray(tokens.race_planes), jnp.asarray(tokens.lsh_planes)

    def attend(query: Array, key: Array, value: Array) -> dict[str, Array]:
        out, branches = elsaa_jax.elsaa_attention(
            query,
            key,
            value,
            race_planes=race_planes,
            lsh_planes=lsh_planes,
            config=ElsaaConfig(race=RACE, sparse=sparse),
            is_causal=form.is_causal,
            return_branches=True,
        )
        fused: dict[str, Array] = {kind: elsaa_jax.fuse(*branches, kind=kind) for kind in FUSION_KINDS}
        return {**fused, "elsaa": out, "sparse": branches[0].out, "low_rank": branches[1].out}

    return materialize(attend, tokens.query, tokens.key)


def theory_operators(tokens: Tokens, form: Form) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the same matrices built by `elsaa_jax.theory`, and the support of the sparse branch."""
    support = theory.sort_lsh_support(
        tokens.query, tokens.key, tokens.lsh_planes, block_size=SPARSE.block_size, **form._asdict()
    )
    sparse = theory.softmax_operator(tokens.query, tokens.key, support)
    low_rank = theory.race_operator(tokens.query, tokens.key, tokens.race_planes, is_causal=form.is_causal)
    fused: dict[str, np.ndarray] = {kind: theory.fused_operator(sparse, low_rank, kind=kind) for kind in FUSION_KINDS}
    return {**fused, "sparse": sparse.matrix, "low_rank": low_rank.matrix}, support


def operator_row(seed: int, length: int, form: Form) -> dict[str, Any]:
    """Measures the largest difference between the entries of the library's and the theory's matrices."""
    tokens = draw_tokens(seed, length)
    library, (built, support) = library_operators(tokens, form), theory_operators(tokens, form)
    differences = {name: float(np.abs(library[name] - built[name]).max()) for name in built}
    same = bool(np.array_equal(library["sparse"] > 0, support))
    return {"n": length, **form._asdict(), "same_support": same, "differences": differences}


def rank_rows(seeds: Sequence[int], lengths: Sequence[int], vocabulary: int | None = None) -> list[dict[str, Any]]:
    """Computes matching sizes and numerical ranks of each branch and of both, over lengths, forms and seeds."""
    rows = []
    for length, is_causal, seed in itertools.product(lengths, (False, True), seeds):
        tokens = draw_tokens(seed, length, vocabulary)
        everything = np.tri(length, dtype=bool) if is_causal else np.ones((length, length), bool)
        exact = theory.softmax_operator(tokens.query, tokens.key, everything)
        low_rank = theory.race_operator(tokens.query, tokens.key, tokens.race_planes, is_causal=is_causal)
        shared = {"exact": theory.numerical_rank(exact.matrix), "low_rank": theory.numerical_rank(low_rank.matrix)}
        for form in (form for form in FORMS if form.is_causal == is_causal):
            built, support = theory_operators(tokens, form)
            row = {"n": length, **form._asdict(), "seed": seed, "matching": theory.matching_size(support), **shared}
            ranks = {"sparse": theory.numerical_rank(built["sparse"]), "both": theory.numerical_rank(built["elsaa"])}
            rows.append({**row, **ranks})
    return rows
