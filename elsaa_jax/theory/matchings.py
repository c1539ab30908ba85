"""Maximum matchings of supports, as bipartite graphs of rows and columns.

The size of a maximum matching is a maximum flow. SciPy's own bipartite matching is not used: its depth-first search
does not mark dead ends, and takes exponential time for supports of neighbouring blocks.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csgraph, csr_array

from elsaa_jax.theory.supports import Support, check_support

# Supports with fewer edges are not merged first: their flow is found sooner than equal rows.
MERGED_EDGES = 20_000
# Edges whose weights are summed at a time, which bounds the temporary memory.
EDGES_AT_A_TIME = 1 << 22


def matching_size(support: Support) -> int:
    """Computes nu, the size of a maximum matching of rows and columns.

    A support whose diagonal is full needs no search, so that causal supports are fast. Otherwise it is a maximum flow.
    In large supports equal rows and equal columns are merged first, which leaves one vertex for each block of a block
    support.

    Args:
      support: Boolean matrix, dense or SciPy sparse.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> theory.matching_size(np.array([[True, True, True], [True, False, False], [True, False, False]]))
      2
    """
    support = check_support(support)
    if _has_full_diagonal(support):
        return min(support.shape)
    if support.nnz < MERGED_EDGES:
        return _maximum_flow(support, *(np.ones(number, np.int64) for number in support.shape))
    merged, row_sizes = _merge_rows(support)
    merged, column_sizes = _merge_rows(merged.T.tocsr())
    return _maximum_flow(merged.T.tocsr(), row_sizes, column_sizes)


def deficiency(support: Support) -> int:
    """Computes d = n - nu, the number of the n rows that a maximum matching leaves out.

    Args:
      support: Boolean matrix, dense or SciPy sparse.

    Example:
      >>> import numpy as np
      >>> from elsaa_jax import theory
      >>> theory.deficiency(np.array([[True, True, True], [True, False, False], [True, False, False]]))
      1
    """
    return int(support.shape[0]) - matching_size(support)


def _has_full_diagonal(support: csr_array) -> bool:
    """Tells whether every row has the column at its own position, counted from the end."""
    rows, columns = support.shape
    return rows <= columns and bool(support.diagonal(columns - rows).all())


def _merge_rows(support: csr_array) -> tuple[csr_array, np.ndarray]:
    """Keeps one of all rows with the same columns, and returns how many rows each kept row stands for.

    Rows are told apart by sums of random 128-bit weights of their columns. Two different rows get equal sums with
    probability 2^-128.
    """
    rows, columns = support.shape
    weights = np.random.default_rng(0).integers(0, 2**64, (columns, 2), np.uint64)
    sums = np.zeros((rows, 2), np.uint64)
    first = 0
    while first < rows:
        begin = support.indptr[first]
        last = max(first + 1, int(np.searchsorted(support.indptr, begin + EDGES_AT_A_TIME, side="right")) - 1)
        edges = support.indices[begin : support.indptr[last]]
        lengths = np.diff(support.indptr[first : last + 1])
        # reduceat gives the next entry for an empty row, so only rows with an edge take part.
        filled = np.flatnonzero(lengths)
        if len(filled):
            sums[first + filled] = np.add.reduceat(weights[edges], support.indptr[first + filled] - begin, axis=0)
        first = last
    _, kept, sizes = np.unique(sums, axis=0, return_index=True, return_counts=True)
    return support[kept], sizes


def _maximum_flow(support: csr_array, row_sizes: np.ndarray, column_sizes: np.ndarray) -> int:
    """Computes the maximum flow from a source through rows and columns of these sizes to a sink, by Dinic."""
    rows, columns = support.shape
    nodes = rows + columns + 2
    # Nodes: the source, all rows, all columns, the sink.
    counts = np.concatenate([[rows], np.diff(support.indptr), np.ones(columns), [0]])
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = np.concatenate([np.arange(1, rows + 1), support.indices + rows + 1, np.full(columns, nodes - 1)])
    edges = np.minimum(np.repeat(row_sizes, np.diff(support.indptr)), column_sizes[support.indices])
    capacity = np.concatenate([row_sizes, edges, column_sizes]).astype(np.int32)
    graph = csr_array((capacity, indices.astype(np.int32), indptr), shape=(nodes, nodes))
    return int(csgraph.maximum_flow(graph, 0, nodes - 1, method="dinic").flow_value)
