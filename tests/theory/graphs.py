"""Graphs by brute force."""

import itertools


def subsets(n):
    return itertools.chain.from_iterable(itertools.combinations(range(n), size) for size in range(n + 1))


def brute_matching(support):
    """The largest matching, over all injections of rows into columns."""
    n = len(support)
    return max(sum(support[i, order[i]] for i in range(n)) for order in itertools.permutations(range(n)))
