"""Counts of work: the paper's example, plans against supports, and programs against products counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import elsaa_jax
from elsaa_jax import RaceConfig, SortLshConfig, dispatch, reference
from elsaa_jax.checks import check_call
from elsaa_jax.sparse.sort_lsh import make_sparse, sparse_branch
from elsaa_jax.theory import complexity


def test_the_example_of_the_appendix():
    counts = complexity.paper_interactions(32_000, RaceConfig(num_tables=4, num_bits=4), SortLshConfig(block_size=256))
    assert counts == (1_024_000_000, 8_192_000, 2_048_000)
    assert counts.elsaa == 10_240_000
    assert counts.elsaa / counts.exact == 0.01
    wide = complexity.paper_interactions(100, RaceConfig(), SortLshConfig(block_size=8, num_neighbors=2))
    assert wide.sparse == 100 * 5 * 8
    with pytest.raises(ValueError, match="length is 0; it must be an integer >= 1"):
        complexity.paper_interactions(0, RaceConfig(), SortLshConfig())


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "is_causal", "options"),
    [
        (100, 100, False, {"block_size": 16, "num_neighbors": 1}),
        (100, 100, False, {"block_size": 16, "pairing": "bucket"}),
        (30, 100, False, {"block_size": 16, "num_neighbors": 9}),
        (100, 100, False, {"min_length": 100}),
        (100, 100, True, {"block_size": 8, "min_length": 16}),
        (33, 77, True, {"block_size": 5, "min_length": 7}),
        (20, 20, True, {"block_size": 32}),
    ],
)
def test_pairs_of_a_plan_are_those_of_the_support(num_queries, num_keys, is_causal, options):
    rng = np.random.default_rng(0)
    query, key, planes = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((1, num_queries, 1, 8), (1, num_keys, 1, 8), (4, 8))
    )
    config = SortLshConfig(num_bits=4, **options)
    scores = complexity.count_scores(query, key, planes, config, is_causal=is_causal)
    support = reference.sort_lsh_support(query, key, planes, is_causal=is_causal, **options)
    assert scores.attended == support.sum()
    # What the library itself counts while it attends.
    facts = check_call(query, key, key, is_causal=is_causal)
    call = make_sparse(facts, config, True, dispatch.XLA, count_keys=True)
    _, count = sparse_branch(call, query, key, key, planes, None, None)
    assert scores.attended == count.sum()
    exact = num_keys <= (config.min_length or (config.block_size if is_causal else 0))
    if exact:
        assert scores.in_tiles == 0
    elif not is_causal:
        assert scores.in_tiles >= scores.attended


def test_one_head_at_a_time():
    two = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"query has shape \(1, 8, 2, 4\); it must be \(1, length, 1, head_dim\)"):
        complexity.count_scores(two, two, jnp.ones((3, 4)), SortLshConfig())


def products(function, *shapes):
    return complexity.count_multiply_adds(function, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def test_multiply_adds():
    assert products(lambda a, b: a @ b, (3, 5), (5, 7)) == 3 * 5 * 7
    assert products(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (2, 3, 5), (2, 4, 5)) == 2 * 3 * 4 * 5
    looped = jax.jit(lambda a, b: jax.lax.fori_loop(0, 6, lambda _, c: c + a @ b, jnp.zeros((3, 3))))
    assert products(looped, (3, 5), (5, 3)) == 6 * 45
    branches = [lambda a, b: a @ b, lambda a, b: (a @ b) @ (a @ b)]
    assert products(lambda a, b: jax.lax.cond(a[0, 0] > 0, *branches, a, b), (3, 3), (3, 3)) == 3 * 27
    assert products(lambda a: jnp.sin(a), (3,)) == 0

    def endless(a):
        return jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ c, a)

    with pytest.raises(ValueError, match="the program has a loop whose length depends on data"):
        products(endless, (3, 3))

    def hidden(a):
        return jax.pure_callback(lambda x: x @ x, jax.ShapeDtypeStruct((3, 3), jnp.float32), a)

    with pytest.raises(ValueError, match="the program calls 'pure_callback', whose work it does not show"):
        products(hidden, (3, 3))


def test_a_kernel_counts_as_often_as_its_grid_has_programs():
    def kernel(x, y, out):
        out[...] = x[...] @ y[...]

    def product(x, y):
        rows, whole = pl.BlockSpec((4, 5), lambda i, j: (i, 0)), pl.BlockSpec((5, 7), lambda i, j: (0, j))
        result = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32)
        blocks = pl.BlockSpec((4, 7), lambda i, j: (i, j))
        return pl.pallas_call(kernel, result, grid=(6, 3), in_specs=[rows, whole], out_specs=blocks)(x, y)

    assert products(product, (24, 5), (5, 21)) == 24 * 5 * 21


def test_multiply_adds_of_the_race_kernels():
    """They grow with the length: hashes, four products over the bits, and writing or reading a value per bucket."""
    head_dim, tables, bits = 64, 4, 4
    planes = jnp.ones((tables, bits, head_dim))

    def attend(*qkv):
        return elsaa_jax.race_attention(*qkv, planes, implementation="pallas")

    for n in (512, 1024, 8192):
        a_token = tables * bits * head_dim + bits * (tables * bits) * (tables * 2**bits) + tables * 2**bits * head_dim
        assert products(attend, *[(1, n, 1, head_dim)] * 3) == 2 * n * a_token


def test_kernels_with_loops_over_data_are_refused():
    planes = jnp.ones((4, 4, 64))
    with pytest.raises(ValueError, match="the program has a loop whose length depends on data"):
        products(
            lambda *qkv: elsaa_jax.race_attention(*qkv, planes, is_causal=True, implementation="pallas"),
            *[(1, 512, 1, 64)] * 3,
        )


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_multiply_adds_of_attention(num_blocks):
    """Logits and values are 2 H for a pair, hashes P H for a token; lengths that leave nothing to pad."""
    n, head_dim, bits, block = 64 * num_blocks, 16, 5, 64
    shapes = [(1, n, 1, head_dim)] * 3
    xla = {"implementation": "xla"}
    exact = products(lambda *qkv: elsaa_jax.exact_attention(*qkv, **xla), *shapes)
    assert exact == 2 * head_dim * n * n
    planes = jnp.ones((bits, head_dim))
    sparse = products(lambda *qkv: elsaa_jax.sort_lsh_attention(*qkv, planes, block_size=block, **xla), *shapes)
    assert sparse == 2 * head_dim * n * block + 2 * n * bits * head_dim
    tables = jnp.ones((3, 2, head_dim))
    buckets = 3 * 2**2
    low_rank = products(lambda *qkv: elsaa_jax.race_attention(*qkv, tables, **xla), *shapes)
    # Writing and reading a value in each bucket, the hashes of both sides, and the 2 signs of each bucket's corner.
    assert low_rank == 2 * n * buckets * head_dim + 2 * n * 6 * head_dim + 2 * n * buckets * 2


def test_causal_attention_is_more_than_the_formula():
    """The levels of the causal split and its exact base come on top of N s."""
    n, block, base = 1024, 32, 64
    rng = np.random.default_rng(1)
    query, key = (jnp.asarray(rng.normal(size=(1, n, 1, 8)), jnp.float32) for _ in range(2))
    planes = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    for pairing, neighbors in (("rank", 0), ("bucket", 1)):
        config = SortLshConfig(num_bits=4, block_size=block, min_length=base, num_neighbors=neighbors, pairing=pairing)
        attended = complexity.count_scores(query, key, planes, config, is_causal=True).attended
        # Base: (N0 + 1) / 2 a token. Four levels, each with half of the tokens as queries of one to three blocks.
        levels = attended - n * (base + 1) // 2
        blocks = levels / (4 * (n // 2) * block)
        assert blocks == 1 if neighbors == 0 else 1.5 < blocks < 3
        assert attended > n * block
