"""Orders and counts in windows, against a sort and a count in each window."""

import jax.numpy as jnp
import numpy as np
import pytest

from elsaa_jax.sparse import levels, orders


def sorted_in_windows(ranks, first, size):
    """Tokens by (window, rank, place), as one sort."""
    position = first + np.arange(len(ranks))
    return np.lexsort((position, ranks, position // size))


@pytest.mark.parametrize(("first", "length"), [(0, 64), (0, 61), (13, 50), (40, 7), (63, 1)])
def test_windows_part_as_if_sorted_anew(first, length):
    ranks = np.random.default_rng(0).integers(4, size=(2, 3, length))
    order = jnp.asarray([[sorted_in_windows(row, first, 64) for row in rows] for rows in ranks], jnp.int32)
    for half in (32, 16, 8, 4, 2, 1):
        above = order
        order, before = levels.split_windows(above, jnp.int32(half), first)
        expected = [[sorted_in_windows(row, first, half) for row in rows] for rows in ranks]
        np.testing.assert_array_equal(order, expected)
        is_second = (first + np.asarray(above)) // half % 2
        np.testing.assert_array_equal(before[..., 1:], np.cumsum(is_second, axis=2))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(64, 64), (61, 61), (9, 50)])
def test_bounds_part_as_if_counted_anew(num_queries, num_keys):
    rng = np.random.default_rng(1)
    keys, queries = (rng.integers(5, size=(2, 2, n)) for n in (num_keys, num_queries))
    position = num_keys - num_queries + np.arange(num_queries)
    order, ranks = orders.sort_tokens(orders.Ranks(jnp.asarray(keys, jnp.int32), 5))
    bound = orders.bucket_bounds(ranks, jnp.asarray(queries, jnp.int32))[0]

    def below(size):
        """Keys of the window of `size` positions that has the query, with a smaller rank than its own."""
        same = np.arange(num_keys) // size == position[:, None] // size
        smaller = keys[:, :, None, :] < queries[..., None]
        return smaller & same

    np.testing.assert_array_equal(bound, below(64).sum(-1))
    for half in (32, 16, 8):
        window, is_second = jnp.asarray(position // (2 * half), jnp.int32), position // half % 2 == 1
        order, before = levels.split_windows(order, jnp.int32(half), 0)
        first, second = levels.split_bounds(bound, before, window, jnp.int32(half))
        counted = below(2 * half)
        in_second = np.arange(num_keys) // half % 2 == 1
        np.testing.assert_array_equal(first, (counted & ~in_second).sum(-1))
        np.testing.assert_array_equal(second, (counted & in_second).sum(-1))
        bound = jnp.where(is_second[None, None], second, first)


def test_sorting_is_the_same_where_ranks_do_not_fit_into_one_integer():
    values = jnp.asarray(np.random.default_rng(2).integers(3, size=(1, 2, 40)), jnp.int32)
    for packed, apart in zip(
        orders.sort_tokens(orders.Ranks(values, 3)), orders.sort_tokens(orders.Ranks(values, 2**31)), strict=True
    ):
        np.testing.assert_array_equal(packed, apart)


def test_the_largest_rank_fits():
    """65,536 tokens of 16 bits fill 32 bits to the last."""
    values = jnp.full((1, 1, 65_536), 65_535, jnp.int32)
    order, ranks = orders.sort_tokens(orders.mask_ranks(values, None, 16))
    np.testing.assert_array_equal(order[0, 0], np.arange(65_536))
    np.testing.assert_array_equal(ranks, values)
