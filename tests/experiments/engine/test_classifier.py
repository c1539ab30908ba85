"""The classifier: what it reads, that it learns, and what its layers tell."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elsaa_jax import ElsaaConfig, RaceConfig, SortLshConfig
from experiments.engine import classifier
from experiments.engine.classifier import Classifier, ClassifierConfig, layer_means

CONFIG = ElsaaConfig(race=RaceConfig(num_tables=2, num_bits=2, chunk_size=8), sparse=SortLshConfig(4, 8))
SIZES = {"width": 16, "num_layers": 2, "num_heads": 2, "mlp_width": 16}


def make(attention="exact", **sizes):
    return Classifier(ClassifierConfig(**{**SIZES, **sizes}), 5, 30, attention, CONFIG)


def test_patches_are_in_raster_order():
    """With a projection that copies its pixels, token i is patch i."""
    model = make(width=4, num_layers=1, patch_size=2, readout="last")
    image = jnp.arange(2 * 4 * 6, dtype=jnp.float32).reshape(2, 4, 6, 1)
    variables = classifier.init(model, jax.random.key(0), jax.ShapeDtypeStruct((4, 6, 1), jnp.float32))
    variables["params"]["patches"] = {"kernel": jnp.eye(4).reshape(2, 2, 1, 4), "bias": jnp.zeros(4)}
    seen: list[jax.Array] = []

    def keep(next_function, args, kwargs, context):
        if context.module.name == "attention_norm_0":
            seen.append(args[0])
        return next_function(*args, **kwargs)

    with nn.intercept_methods(keep):
        model.apply(variables, image)
    wanted = np.asarray(image).reshape(2, 2, 2, 3, 2).transpose(0, 1, 3, 2, 4).reshape(2, 6, 4)
    np.testing.assert_array_equal(seen[0], wanted)


@pytest.mark.parametrize("readout", ["last", "mean"])
def test_a_causal_classifier_reads_all_that_came(readout):
    model = make(is_causal=True, readout=readout, positions="learned", num_positions=24)
    tokens = jax.random.randint(jax.random.key(0), (2, 24), 0, 30)
    variables = classifier.init(model, jax.random.key(1), jax.ShapeDtypeStruct((24,), jnp.int32))
    before = model.apply(variables, tokens)
    changed = model.apply(variables, tokens.at[:, 0].add(1) % 30)
    assert float(jnp.abs(before - changed).max()) > 1e-6


@pytest.mark.parametrize("readout", ["class", "first"])
def test_a_causal_class_token_is_refused(readout):
    with pytest.raises(ValueError, match=f"readout is {readout!r}, and a causal model sees nothing there; use 'last'"):
        ClassifierConfig(is_causal=True, readout=readout)


def test_overlapping_patches_keep_their_number():
    model = make(patch_size=2, patch_margin=3, readout="class", positions="learned", num_positions=17)
    shape = jax.ShapeDtypeStruct((8, 8, 3), jnp.float32)
    variables = classifier.init(model, jax.random.key(0), shape)
    chex.assert_shape(variables["params"]["patches"]["kernel"], (8, 8, 3, 16))
    chex.assert_shape(model.apply(variables, jnp.zeros((3, 8, 8, 3))), (3, 5))


def test_positions_that_begin_as_waves():
    table = np.asarray(classifier.grid_start(jax.random.key(0), (17, 8)))
    np.testing.assert_array_equal(table[0], 0)
    grid = table[1:].reshape(4, 4, 8)
    np.testing.assert_array_equal(grid[:, 0, :4], grid[:, 3, :4])  # of the row
    np.testing.assert_array_equal(grid[0, :, 4:], grid[3, :, 4:])  # of the column
    np.testing.assert_allclose(grid[2, 3], np.concatenate([wave(2), wave(3)]), rtol=1e-6)
    chex.assert_shape(classifier.grid_start(jax.random.key(0), (16, 8)), (16, 8))
    with pytest.raises(ValueError, match=r"grid_positions is True with positions = 'none' and width = 16"):
        ClassifierConfig(**SIZES, grid_positions=True)


def wave(place):
    angles = place * np.array([1.0, 0.01])
    return np.concatenate([np.sin(angles), np.cos(angles)])


@pytest.mark.parametrize("readout", ["first", "mean", "max", "last", "halves"])
def test_what_is_read(readout):
    """The head gets the features of the readout: the model up to its last norm, read by hand, gives the same."""
    model = make("elsaa", readout=readout)
    variables = classifier.init(model, jax.random.key(0), jax.ShapeDtypeStruct((24,), jnp.int32))
    tokens = jax.random.randint(jax.random.key(2), (2, 24), 0, 30)
    logits = model.apply(variables, tokens)
    whole = Classifier(ClassifierConfig(**SIZES, readout="mean"), 5, 30, "elsaa", CONFIG)
    params = dict(variables["params"])
    head = params.pop("head")
    features: list[jax.Array] = []

    def keep(next_function, args, kwargs, context):
        out = next_function(*args, **kwargs)
        if context.module.name == "norm":
            features.append(out)
        return out

    params["head"] = {"kernel": jnp.zeros((16, 5)), "bias": jnp.zeros(5)}
    with nn.intercept_methods(keep):
        whole.apply({**variables, "params": params}, tokens)
    x = np.asarray(features[0])
    wanted = {
        "first": x[:, 0],
        "last": x[:, -1],
        "mean": x.mean(1),
        "max": x.max(1),
        "halves": np.abs(x[:, :12].mean(1) - x[:, 12:].mean(1)) * 12**0.5,
    }[readout]
    np.testing.assert_allclose(logits, wanted @ head["kernel"] + head["bias"][None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("attention", "names"),
    [
        ("elsaa", {"multiplier", "lam", "gate_sparse", "gate_low_rank", "sparse_log_mass", "low_rank_log_mass"}),
        ("sort_lsh_race", {"gate_sparse", "gate_low_rank", "sparse_log_mass", "low_rank_log_mass"}),
        ("exact", {"log_mass"}),
    ],
)
def test_every_layer_tells_of_its_branches(attention, names):
    model = make(attention, dropout_rate=0.1)
    variables = classifier.init(model, jax.random.key(0), jax.ShapeDtypeStruct((24,), jnp.int32))
    tokens = jax.random.randint(jax.random.key(2), (2, 24), 0, 30)
    logits, means = classifier.apply_training(model, variables, tokens, jax.random.key(1))
    chex.assert_shape(logits, (2, 5))
    assert set(means) == {f"layer_{layer}/{name}" for layer in range(2) for name in names}
    record = {name: float(value) for name, value in means.items()}
    found = layer_means(record)
    assert set(found) == names
    for name, values in found.items():
        assert len(values) == 2
        if name == "multiplier" or name.startswith("gate"):
            assert all(0 < value < 1 for value in values)


def test_blocks_that_are_computed_anew():
    """The same variables, logits, means and gradients."""
    tokens = jax.random.randint(jax.random.key(2), (2, 24), 0, 30)

    def run(remat):
        model = make("elsaa", remat=remat)
        variables = classifier.init(model, jax.random.key(0), jax.ShapeDtypeStruct((24,), jnp.int32))

        def loss(params):
            logits, means = classifier.apply_training(model, {**variables, "params": params}, tokens, jax.random.key(1))
            return jnp.sum(logits**2), means

        return variables, jax.value_and_grad(loss, has_aux=True)(variables["params"])

    (kept, wanted), (anew, found) = run(False), run(True)
    chex.assert_trees_all_equal(kept, anew)
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-5)
