"""Formulas for parameters, hashing, sorting, memory and keys read, each against a count from the real program."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elsaa_jax
from elsaa_jax import ELSAA, ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from elsaa_jax.layers.spec import ATTENTION_KINDS
from elsaa_jax.theory import complexity

CONFIGS = {
    "default": ElsaaConfig(),
    "query lambda": ElsaaConfig(fusion=FusionConfig(lambda_kind="query", gate_hidden=17)),
    "fixed lambda": ElsaaConfig(RaceConfig(learn_beta=False), fusion=FusionConfig(lambda_kind="fixed")),
    "gate of the query": ElsaaConfig(fusion=FusionConfig(gate_input="query", kind="sum")),
    "convolutions": ElsaaConfig(short_conv=3),
}


def layer_of(config, **fields):
    def init(rng):
        return ELSAA(num_heads=4, config=config, **fields).init({"params": rng, "hashes": rng}, jnp.ones((1, 8, 64)))

    return jax.eval_shape(init, jax.random.key(0))["params"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_parameters_are_those_of_the_layer(name, num_kv_heads):
    config = CONFIGS[name]
    for attention, use_bias in itertools.product(ATTENTION_KINDS, (True, False)):
        fields = {"num_kv_heads": num_kv_heads, "use_bias": use_bias, "attention": attention}
        found = layer_of(config, **fields)
        parameters = complexity.layer_parameters(64, 4, config, **fields)
        projections = complexity.count_parameters([found[x] for x in ("query", "key", "value", "out")])
        assert parameters.projections == projections
        assert parameters.gate == complexity.count_parameters(found.get("gate", {}))
        assert parameters.lam == complexity.count_parameters([x for k, x in found.items() if "lambda" in k])
        assert parameters.beta == complexity.count_parameters(found.get("log_beta", ()))
        assert parameters.convolutions == complexity.count_parameters([x for k, x in found.items() if "conv" in k])
        assert sum(parameters) == complexity.count_parameters(found)


def test_the_parameters_of_the_papers_text_setting_are_not_negligible():
    parameters = complexity.layer_parameters(256, 4, ElsaaConfig(), use_bias=False)
    assert parameters == (4 * 256**2, 256 * 64 + 64 + 64 * 2 + 2, 1, 1, 0)
    assert parameters.overhead == pytest.approx(0.0632, abs=1e-4)
    assert complexity.layer_parameters(256, 4, ElsaaConfig()).overhead == pytest.approx(0.063, abs=1e-3)
    with pytest.raises(ValueError, match="features is 10; it must be a multiple of num_heads = 4"):
        complexity.layer_parameters(10, 4, ElsaaConfig())


def shapes(num_queries, num_keys, head_dim, num_heads=1, num_kv_heads=1):
    sizes = (num_queries, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads)
    return [jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.float32) for length, heads in sizes]


@pytest.mark.parametrize("num_ensembles", [1, 2])
def test_hashing_of_the_low_rank_branch(num_ensembles):
    n, head_dim = 256, 16
    race = RaceConfig(num_tables=3, num_bits=2, num_ensembles=num_ensembles)
    planes = jnp.ones((race.total_tables, race.num_bits, head_dim))
    work = complexity.hashing_work(n, n, head_dim, race, SortLshConfig())
    counted = complexity.count_multiply_adds(
        lambda *qkv: elsaa_jax.race_attention(*qkv, planes, num_ensembles=num_ensembles, implementation="xla"),
        *shapes(n, n, head_dim),
    )
    buckets = complexity.paper_interactions(n, race, SortLshConfig()).low_rank
    assert counted == work.soft_planes + work.soft_corners + 2 * head_dim * buckets


@pytest.mark.parametrize(("num_queries", "is_causal"), [(256, False), (256, True), (64, True)])
def test_hashing_and_sorting_of_the_sparse_branch(num_queries, is_causal):
    n, head_dim = 256, 16
    planes = jnp.ones((5, head_dim))
    work = complexity.hashing_work(num_queries, n, head_dim, RaceConfig(), SortLshConfig(num_bits=5))

    def codes(query, key, _):
        return elsaa_jax.hard_codes(query, planes), elsaa_jax.hard_codes(key, planes)

    def attend(*qkv):
        options = {"block_size": 16, "is_causal": is_causal, "implementation": "xla"}
        return elsaa_jax.sort_lsh_attention(*qkv, planes, **options)

    arguments = shapes(num_queries, n, head_dim)
    assert complexity.count_multiply_adds(codes, *arguments) == work.hard_codes
    if not is_causal:
        pairs = 2 * head_dim * n * 16
        assert complexity.count_multiply_adds(attend, *arguments) == work.hard_codes + pairs
    # One sort of the queries and one of the keys, however many levels there are.
    assert complexity.count_sorted_tokens(attend, *arguments) == work.sorted_tokens == num_queries + n


MEMORY_CONFIG = ElsaaConfig(
    RaceConfig(num_tables=3, num_bits=4, chunk_size=64), SortLshConfig(num_bits=5, block_size=64)
)


def kept_bytes(function, arguments):
    inputs = sum(x.size * x.dtype.itemsize for x in arguments)
    return complexity.count_kept_bytes(function, *arguments) - inputs


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("n", [512, 1000])
def test_memory_that_is_kept_for_the_backward_pass(n, num_kv_heads, is_causal):
    num_heads, head_dim = 4, 32
    arguments = shapes(n, n, head_dim, num_heads, num_kv_heads)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    memory = complexity.kept_memory(n, head_dim, MEMORY_CONFIG, **heads, is_causal=is_causal)
    race_planes, lsh_planes = jnp.ones((3, 4, head_dim)), jnp.ones((5, head_dim))
    options = {"is_causal": is_causal, "implementation": "xla"}
    assert memory.inputs == sum(x.size * 4 for x in arguments)

    sparse = kept_bytes(
        lambda *qkv: elsaa_jax.sort_lsh_attention(*qkv, lsh_planes, block_size=64, **options), arguments
    )
    if is_causal:
        plan = sparse - memory.sparse_rows
        assert 0.5 * memory.sparse_plan < plan <= memory.sparse_plan
    else:
        assert sparse == memory.sparse_rows + memory.sparse_plan

    low_rank = kept_bytes(lambda *qkv: elsaa_jax.race_attention(*qkv, race_planes, chunk_size=64, **options), arguments)
    constants = race_planes.nbytes + 8
    assert memory.race_state < low_rank - constants <= memory.race_state + memory.race_rows

    both = kept_bytes(
        lambda *qkv: elsaa_jax.elsaa_attention(
            *qkv, race_planes=race_planes, lsh_planes=lsh_planes, config=MEMORY_CONFIG, **options
        ),
        arguments,
    )
    assert 0.8 * (memory.total - memory.inputs) < both - constants <= memory.total - memory.inputs


def test_memory_with_neighbours_and_in_buckets():
    n, head_dim = 500, 16
    for pairing, neighbors in (("rank", 1), ("bucket", 0), ("bucket", 2)):
        sparse = SortLshConfig(block_size=32, num_neighbors=neighbors, pairing=pairing)
        memory = complexity.kept_memory(n, head_dim, ElsaaConfig(sparse=sparse))
        planes = jnp.ones((5, head_dim))
        options = {"block_size": 32, "num_neighbors": neighbors, "pairing": pairing, "implementation": "xla"}
        arguments = shapes(n, n, head_dim)
        found = kept_bytes(
            lambda *qkv, options=options, planes=planes: elsaa_jax.sort_lsh_attention(*qkv, planes, **options),
            arguments,
        )
        plan = found - memory.sparse_rows
        assert 0.5 * memory.sparse_plan < plan <= memory.sparse_plan
    with pytest.raises(ValueError, match="min_length is 'auto'; the memory needs a number"):
        complexity.kept_memory(n, head_dim, ElsaaConfig(sparse=SortLshConfig(min_length="auto")))


def test_temporary_memory_is_not_quadratic():
    """The compiled program holds neither N^2 scores nor the N (s + L 2^P) numbers of the paper's formula at 8,192."""
    n, head_dim = 8192, 16
    config = ElsaaConfig(sparse=SortLshConfig(block_size=256))
    planes = jnp.ones((4, 4, head_dim))
    found = complexity.count_temporary_bytes(
        lambda *qkv: elsaa_jax.elsaa_attention(*qkv, race_planes=planes, config=config, implementation="xla"),
        *shapes(n, n, head_dim),
    )
    assert found < 4 * n * n / 4


@pytest.mark.parametrize(("base", "block"), [(16, 8), (32, 32), (8, 32)])
def test_keys_that_the_last_query_reads(base, block):
    """One query at the end of S keys: what a decode step reads, by the plan of the branch and by the definition."""
    config = SortLshConfig(num_bits=3, block_size=block, min_length=base)
    rng = np.random.default_rng(0)
    planes = jnp.asarray(rng.normal(size=(3, 8)), jnp.float32)
    for num_keys in (1, 7, 33, 64, 100, 127, 128):
        query, key = (jnp.asarray(rng.normal(size=(1, n, 1, 8)), jnp.float32) for n in (1, num_keys))
        scores = complexity.count_scores(query, key, planes, config, is_causal=True)
        assert scores.attended == complexity.keys_read(num_keys - 1, config)


def test_keys_read_by_all_queries_sum_to_the_support():
    config = SortLshConfig(block_size=8, min_length=16)
    rng = np.random.default_rng(1)
    support = elsaa_jax.theory.sort_lsh_support(
        *(rng.normal(size=(n, 8)) for n in (300, 300, 3)), block_size=8, min_length=16, is_causal=True, sparse=True
    )
    assert [complexity.keys_read(p, config) for p in range(300)] == list(np.diff(support.indptr))
    with_neighbors = SortLshConfig(block_size=8, min_length=16, num_neighbors=1)
    support = elsaa_jax.theory.sort_lsh_support(
        *(rng.normal(size=(n, 8)) for n in (300, 300, 3)),
        block_size=8,
        min_length=16,
        num_neighbors=1,
        is_causal=True,
        sparse=True,
    )
    bounds = np.array([complexity.keys_read(p, with_neighbors) for p in range(300)])
    assert (np.diff(support.indptr) <= bounds).all()
    assert (np.diff(support.indptr) == bounds).mean() > 0.2
    assert max(bounds) <= 16 + 3 * 8 * np.ceil(np.log2(300 / 16))
