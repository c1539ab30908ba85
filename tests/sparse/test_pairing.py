"""Queries find their blocks in exact integers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import reference
from elsaa_jax.dispatch import XLA
from elsaa_jax.sparse import orders, pairing
from elsaa_jax.sparse.call import SparseCall
from elsaa_jax.sparse.full import full_plan
from elsaa_jax.sparse.levels import causal_plan
from elsaa_jax.types import CallFacts
from tests.compilation import optimized


@pytest.mark.parametrize("bound", [100, 10**5, 2**24])
def test_floor_ratio_is_exact(bound):
    rng = np.random.default_rng(0)
    denominator = rng.integers(1, 2 * bound, 10_000)
    numerator = rng.integers(0, bound, 10_000)
    r = rng.integers(0, denominator)
    # Products that the denominator divides, where a rounded quotient falls on either side.
    r[:5000], numerator[:5000] = denominator[:5000] - 1, np.minimum(denominator[:5000], bound)
    arrays = (jnp.asarray(x, jnp.int32) for x in (r, numerator, denominator))
    np.testing.assert_array_equal(pairing.floor_ratio(*arrays), r * numerator // denominator)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pair", ["rank", "bucket"])
def test_keys_that_do_not_pack_sort_the_same(pair, is_causal, monkeypatch):
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.integers(0, 8, (2, 2, 90)), jnp.int32) for _ in range(2))
    mask = jnp.asarray(rng.random((2, 90)) < 0.8)
    facts = CallFacts(90, 90, 2, 2, 16, is_causal, 1.0)
    call = SparseCall(facts, 8, 1, pair, 12, False, False, XLA)
    sorts = []

    def plan():
        calls = []
        sort = jax.lax.sort
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                orders.lax, "sort", lambda x, **options: calls.append(isinstance(x, tuple)) or sort(x, **options)
            )
            tokens = orders.sort_both(call, query, key, 3, mask, mask)
            made = (causal_plan if is_causal else full_plan)(call, tokens, mask, mask)
        sorts.append(calls)
        return made

    packed = plan()
    monkeypatch.setattr(orders, "PACKED_LIMIT", 0)
    chex.assert_trees_all_equal(packed, plan())
    assert sorts == [[False, False], [True, True]]  # One integer, then rank and position apart.


def test_places_in_buckets_are_exact():
    # Every bucket of up to 60 keys and every query of up to 60. float32 would miss some 150 of them.
    keys, index, length = (x.ravel() for x in np.meshgrid(*[np.arange(61, dtype=np.int32)] * 3, indexing="ij"))
    keep = index < length
    keys, index, length = keys[keep], index[keep], length[keep]
    lo = keys % 7
    found = optimized(pairing.place_in_bucket)(lo, lo + keys, index, length, lo + keys + 1)
    expected = [
        a + d * (2 * i + 1) // (2 * m)
        for a, d, i, m in zip(*(x.tolist() for x in (lo, keys, index, length)), strict=True)
    ]
    np.testing.assert_array_equal(found, expected)
    rounded = np.floor(
        keys.astype(np.float32) * ((index + np.float32(0.5)) * (np.float32(1) / length.astype(np.float32)))
    )
    assert (rounded + lo != expected).sum() > 100
    # A query past the last key meets the last key.
    np.testing.assert_array_equal(pairing.place_in_bucket(lo, lo + keys, index, length, lo), np.maximum(lo - 1, 0))


def test_support_at_exact_boundaries():
    # Blocks of one key, and 10 of 25 keys in the bucket of all queries: float32 misplaces queries 2 and 7 of 25.
    base = 25
    length, head_dim = 4 * base, 128
    rng = np.random.default_rng(base)
    query, key = np.ones((2, 1, length, 1, head_dim), np.float32)
    key[..., 0] = np.where(rng.permutation(length)[None, :, None] % 5 < 2, 1, -1)
    key[:, :base, :, 0] = np.where(np.arange(base)[None, :, None] < 10, 1, -1)
    value = np.eye(length, head_dim, dtype=np.float32)[None, :, None, :]
    planes = np.eye(2, head_dim, dtype=np.float32)
    options = {"block_size": 1, "min_length": base, "is_causal": True}
    out = optimized(lambda *a: elsaa_jax.sort_lsh_attention(*a, **options).out)(query, key, value, planes)
    support = reference.sort_lsh_support(query, key, planes, **options)
    np.testing.assert_array_equal(out[:, :, 0, :length] > 0, support[:, 0])
