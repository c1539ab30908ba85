"""The support of the sparse branch as a sparse matrix, by sorting and searching instead of comparing all pairs.

The result equals `elsaa_jax.reference.sort_lsh_support` for one head without masks. Every query reads a few ranges of
sorted keys: its block, or, in the causal form, its stretch and one block for each level of the causal split.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from elsaa_jax import reference
from elsaa_jax.checks import check_bool, check_choice, check_int
from elsaa_jax.types import Pairing

# Edges that are written at a time, which bounds the temporary memory.
EDGES_AT_A_TIME = 1 << 22


class Ranges(NamedTuple):
    """Consecutive entries of one array of keys for each query.

    Attributes:
      keys: Key positions, sorted as one level of the branch needs them, (S',) int32.
      start: First entry that each query reads, (T,).
      stop: End of the entries that each query reads, (T,). Equal to `start` if it reads none.
    """

    keys: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def sorted_support(
    query: np.ndarray,
    key: np.ndarray,
    planes: np.ndarray,
    *,
    block_size: int = 256,
    min_length: int = 0,
    num_neighbors: int = 0,
    pairing: Pairing | None = None,
    is_causal: bool = False,
) -> csr_array:
    """Computes the support of the sparse branch for one head as a CSR array (T, S).

    Args:
      query: Queries, (T, H).
      key: Keys, (S, H).
      planes: Hash planes, (P, H).
      block_size: Keys of a block.
      min_length: Number of keys up to which attention is exact; the base length N0 of the causal split.
      num_neighbors: Further blocks on each side.
      pairing: "rank" or "bucket". None means "bucket" if causal and "rank" otherwise.
      is_causal: Whether the queries are the last T of S positions and attend to positions up to their own.
    """
    check_int("block_size", block_size, 1)
    check_int("min_length", min_length, 0)
    check_int("num_neighbors", num_neighbors, 0)
    check_choice("pairing", pairing, (None, "rank", "bucket"))
    check_bool("is_causal", is_causal)
    query, key, planes = (np.asarray(x) for x in (query, key, planes))
    num_queries, num_keys = len(query), len(key)
    if is_causal and num_queries > num_keys:
        raise ValueError(f"query has length {num_queries} and key {num_keys}; with is_causal the first must not exceed")
    if not is_causal and num_keys <= min_length:
        everything = Ranges(np.arange(num_keys), np.zeros(num_queries, int), np.full(num_queries, num_keys))
        return _join([everything], num_keys)
    ranks = _gray_ranks(query, planes), _gray_ranks(key, planes)
    pairing = pairing or ("bucket" if is_causal else "rank")
    if is_causal:
        base = int(min_length or block_size)
        parts = [_stretches(num_queries, num_keys, base)]
        half = base
        while half < num_keys:
            parts.append(_level(*ranks, half, pairing, int(block_size), int(num_neighbors)))
            half *= 2
        return _join(parts, num_keys)
    order = np.argsort(ranks[1], kind="stable")
    if pairing == "rank":
        place = np.empty(num_queries, np.int64)
        place[np.argsort(ranks[0], kind="stable")] = np.arange(num_queries) * num_keys // num_queries
    else:
        low, high = (np.searchsorted(ranks[1][order], ranks[0], side=side) for side in ("left", "right"))
        place = _place_in_bucket(low, high, np.arange(num_queries), num_queries, num_keys)
    start, stop = _block_range(place, int(block_size), int(num_neighbors), num_keys)
    return _join([Ranges(order, start, stop)], num_keys)


def _stretches(num_queries: int, num_keys: int, base: int) -> Ranges:
    """Each query reads the keys of its stretch of `base` positions up to its own position."""
    position = num_keys - num_queries + np.arange(num_queries)
    return Ranges(np.arange(num_keys), position // base * base, position + 1)


def _level(
    query_ranks: np.ndarray, key_ranks: np.ndarray, half: int, pairing: Pairing, block_size: int, num_neighbors: int
) -> Ranges:
    """The second half of each window of 2 * half positions reads blocks of the sorted first half."""
    num_queries, num_keys = len(query_ranks), len(key_ranks)
    positions = np.arange(num_keys)
    first_halves = positions[positions // half % 2 == 0]
    # Windows before ranks: one stable sort orders the keys of all windows.
    stride = int(max(query_ranks.max(), key_ranks.max())) + 1
    combined = first_halves // (2 * half) * stride + key_ranks[first_halves]
    order = np.argsort(combined, kind="stable")
    keys, combined = first_halves[order], combined[order]

    position = num_keys - num_queries + np.arange(num_queries)
    queries = np.flatnonzero(position // half % 2 == 1)
    window = position[queries] // (2 * half)
    wanted = window * stride + query_ranks[queries]
    begin = window * half  # The first halves before a window are all full, and so is that of a window with a query.
    if pairing == "rank":
        sorted_queries = np.argsort(wanted, kind="stable")
        first_of_window = np.searchsorted(window, window)
        number = np.searchsorted(window, window, side="right") - first_of_window
        place = np.empty(len(queries), np.int64)
        # Queries are in the order of their windows, so that the sorted ones of a window fill the same slots.
        place[sorted_queries] = (np.arange(len(queries)) - first_of_window) * half // number
    else:
        low, high = (np.searchsorted(combined, wanted, side=side) - begin for side in ("left", "right"))
        place = _place_in_bucket(low, high, position[queries] % half, half, half)
    start, stop = np.zeros(num_queries, np.int64), np.zeros(num_queries, np.int64)
    block_start, block_stop = _block_range(place, block_size, num_neighbors, half)
    start[queries], stop[queries] = begin + block_start, begin + block_stop
    return Ranges(keys, start, stop)


def _place_in_bucket(low: np.ndarray, high: np.ndarray, turn: np.ndarray, num_turns: int, num_keys: int) -> np.ndarray:
    """Returns the place of each query: min(lo + floor((hi - lo) (2 i + 1) / (2 m)), n - 1), in integers."""
    return np.minimum(low + (high - low) * (2 * turn + 1) // (2 * num_turns), num_keys - 1)


def _block_range(
    place: np.ndarray, block_size: int, num_neighbors: int, num_keys: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and end of the blocks that a query at `place` reads among `num_keys` sorted keys."""
    block = place // block_size
    start = np.maximum(block - num_neighbors, 0) * block_size
    return start, np.minimum((block + num_neighbors + 1) * block_size, num_keys)


def _gray_ranks(x: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Returns the rank of each hash code in the reflected Gray sequence, the inverse of r -> r ^ (r >> 1)."""
    ranks = reference.hard_codes(x, planes).astype(np.int64)
    shift = 1
    while shift < len(planes):
        ranks ^= ranks >> shift
        shift *= 2
    return ranks


def _join(parts: list[Ranges], num_keys: int) -> csr_array:
    """Writes the disjoint ranges of all parts into one CSR array."""
    lengths = np.stack([part.stop - part.start for part in parts], axis=1)
    row_ends = np.cumsum(lengths.sum(axis=1))
    indptr = np.concatenate([[0], row_ends])
    offsets = indptr[:-1, None] + np.cumsum(lengths, axis=1) - lengths
    indices = np.empty(int(indptr[-1]), np.int32)
    num_rows = len(lengths)
    first = 0
    while first < num_rows:
        last = max(first + 1, int(np.searchsorted(row_ends, indptr[first] + EDGES_AT_A_TIME)))
        for part, offset, length in zip(parts, offsets.T, lengths.T, strict=True):
            chosen = slice(first, last)
            count = length[chosen]
            within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            indices[np.repeat(offset[chosen], count) + within] = part.keys[
                np.repeat(part.start[chosen], count) + within
            ]
        first = last
    return csr_array((np.ones(len(indices), bool), indices, indptr), shape=(num_rows, num_keys))
