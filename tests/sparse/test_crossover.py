import chex
import jax
import jax.numpy as jnp
import pytest

import elsaa_jax
from elsaa_jax import ELSAA, ElsaaConfig, RaceConfig, SortLshConfig, exact_attention, reference
from elsaa_jax.sparse import crossover

RACE = RaceConfig(num_tables=2, num_bits=2)


def config_of(min_length):
    return ElsaaConfig(race=RACE, sparse=SortLshConfig(num_bits=3, block_size=8, min_length=min_length))


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(crossover, "longest_exact", lambda is_causal: 32)


def arrays_of(length):
    return jax.random.normal(jax.random.key(0), (3, 1, length, 2, 8))


def attend(length, min_length, is_causal, **options):
    planes = jax.random.normal(jax.random.key(1), (2, 2, 8))
    return elsaa_jax.elsaa_attention(
        *arrays_of(length), race_planes=planes, config=config_of(min_length), is_causal=is_causal, **options
    )


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_up_to_the_crossover(is_causal):
    expected = exact_attention(*arrays_of(32), is_causal=is_causal)
    chex.assert_trees_all_close(attend(32, "auto", is_causal), expected.out, atol=1e-6)
    out, (sparse, low_rank) = attend(32, "auto", is_causal, return_branches=True)
    chex.assert_trees_all_close((out, sparse), (expected.out, expected), atol=1e-6)
    chex.assert_tree_all_finite(low_rank)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize(("is_causal", "as_number"), [(False, 0), (True, crossover.AUTO_BASE)])
def test_elsaa_beyond(is_causal, as_number):
    chex.assert_trees_all_equal(attend(300, "auto", is_causal), attend(300, as_number, is_causal))


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("attention", ["elsaa", "sort_lsh", "sort_lsh_race"])
def test_layers(attention):
    x = jax.random.normal(jax.random.key(2), (2, 32, 16))
    layer = ELSAA(num_heads=2, config=config_of("auto"), attention=attention)
    variables = layer.init(jax.random.key(3), x)
    kept = jnp.arange(32)[None, :] < jnp.array([32, 20])[:, None]
    out = layer.apply(variables, x, mask=kept[:, None, None, :], query_mask=kept)
    exact = ELSAA(num_heads=2, attention="exact")
    parameters = {name: variables["params"][name] for name in ("query", "key", "value", "out")}
    expected = exact.apply({"params": parameters}, x, mask=kept[:, None, None, :])
    chex.assert_trees_all_close(out[kept], expected[kept], atol=1e-5)


def test_the_table_is_for_platforms_that_were_measured(monkeypatch):
    assert set(crossover._table()["cpu"]) == {"causal", "full"}
    monkeypatch.setattr(crossover, "_table", lambda: {"cpu": {"causal": 512, "full": 1024}})
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert crossover.longest_exact(is_causal=True) == 512
    assert crossover.longest_exact(is_causal=False) == 1024
    monkeypatch.setattr(jax, "default_backend", lambda: "abacus")
    assert crossover.longest_exact(is_causal=False) == 0


def test_neither_a_number_nor_auto():
    with pytest.raises(ValueError, match=r"min_length is .soon.; it must be an integer >= 0, or .auto."):
        SortLshConfig(min_length="soon")


def test_the_reference_takes_numbers():
    planes = jax.random.normal(jax.random.key(1), (2, 2, 8))
    with pytest.raises(ValueError, match="must be a number"):
        reference.elsaa_attention(*arrays_of(8), race_planes=planes, config=config_of("auto"))
