"""The linen layer, its nnx twin and the hooks of Flax's own layers."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import elsaa_jax
from elsaa_jax import ELSAA, ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from elsaa_jax import nnx as elsaa_nnx
from elsaa_jax.layers.inputs import rotate, short_convolution
from elsaa_jax.layers.parameters import query_lambda
from elsaa_jax.layers.spec import AttentionSpec

SMALL = {
    "race": RaceConfig(num_tables=3, num_bits=3, chunk_size=16),
    "sparse": SortLshConfig(num_bits=4, block_size=16),
}
CONFIG = ElsaaConfig(**SMALL)
X = jax.random.normal(jax.random.key(0), (2, 50, 32))


def make(attention="elsaa", config=CONFIG, **fields):
    layer = ELSAA(num_heads=4, attention=attention, config=config, **fields)
    return layer, layer.init(jax.random.key(1), X, deterministic=True)


def test_exact_layer_equals_flax():
    flax_layer = nn.MultiHeadDotProductAttention(num_heads=4, normalize_qk=True)
    variables = flax_layer.init(jax.random.key(1), X)
    layer = ELSAA(num_heads=4, normalize_qk=True, attention="exact")
    mask = jnp.arange(50)[None, :] < jnp.asarray([[50], [30]])
    for inputs in ((X,), (X[:, :20], X), (X[:, :20], X, X + 1)):
        ours = layer.apply(variables, *inputs, mask=mask)
        theirs = flax_layer.apply(variables, *inputs, mask=mask[:, None, None, :])
        chex.assert_trees_all_close(ours, theirs, atol=1e-5)
    causal = ELSAA(num_heads=4, normalize_qk=True, attention="exact", is_causal=True)
    theirs = flax_layer.apply(variables, X, mask=nn.make_causal_mask(X[..., 0]))
    chex.assert_trees_all_close(causal.apply(variables, X), theirs, atol=1e-5)


def test_large_blocks_without_the_low_rank_branch_equal_flax():
    config = ElsaaConfig(sparse=SortLshConfig(block_size=64))
    layer, variables = make("sort_lsh", config)
    theirs = nn.MultiHeadDotProductAttention(num_heads=4).apply({"params": variables["params"]}, X)
    chex.assert_trees_all_close(layer.apply(variables, X), theirs, atol=1e-5)


def test_a_checkpoint_of_flax_loads():
    flax_variables = nn.MultiHeadDotProductAttention(num_heads=4).init(jax.random.key(5), X)
    layer, variables = make()
    chex.assert_trees_all_equal_shapes_and_dtypes(
        flax_variables["params"], {name: variables["params"][name] for name in flax_variables["params"]}
    )
    loaded = {**variables, "params": {**variables["params"], **flax_variables["params"]}}
    chex.assert_tree_all_finite(layer.apply(loaded, X))


@pytest.mark.parametrize("attention", elsaa_jax.ATTENTION_KINDS)
def test_a_saved_layer_gives_the_same_output(attention, tmp_path):
    layer, variables = make(attention, is_causal=True)
    assert ("hashes" in variables) == (attention != "exact")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", variables)
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(lambda: layer.init(jax.random.key(7), X, deterministic=True))
        restored = checkpointer.restore(tmp_path / "layer", shapes)
    chex.assert_trees_all_equal(variables, restored)
    chex.assert_trees_all_equal(layer.apply(variables, X), layer.apply(restored, X))


def test_missing_planes_are_named():
    layer, variables = make()
    with pytest.raises(ValueError, match='the collection "hashes" has no'):
        layer.apply({"params": variables["params"]}, X)


def test_parameters_differ_by_gate_and_lambda_alone():
    projections = {"query", "key", "value", "out"}
    added = {
        "elsaa": {"gate", "log_lambda", "log_beta"},
        "sort_lsh_race": {"gate", "log_beta"},
        "race": {"log_beta"},
        "sort_lsh": set(),
        "exact": set(),
        "performer": set(),
    }
    for attention, names in added.items():
        assert set(make(attention)[1]["params"]) == projections | names
    fixed = ElsaaConfig(race=RaceConfig(learn_beta=False), fusion=FusionConfig(lambda_kind="fixed"))
    assert set(make(config=fixed)[1]["params"]) == projections | {"gate"}


def test_planes_are_drawn_for_each_key_value_head():
    _, variables = make(num_kv_heads=2, config=ElsaaConfig(**SMALL, share_planes=False))
    hashes = variables["hashes"]
    chex.assert_shape(hashes["race_planes"], (2, 3, 3, 8))
    chex.assert_shape(hashes["lsh_planes"], (2, 4, 8))
    assert np.abs(hashes["race_planes"][0] - hashes["race_planes"][1]).max() > 0.1
    for share_planes in (None, True):
        _, shared = make(config=ElsaaConfig(**SMALL, share_planes=share_planes))
        assert set(shared["hashes"]) == {"race_planes"}
    few = ElsaaConfig(race=RaceConfig(num_tables=1, num_bits=2))
    assert set(make(config=few)[1]["hashes"]) == {"race_planes", "lsh_planes"}


@pytest.mark.parametrize("kind", ["scalar", "fixed", "query"])
def test_lambda(kind):
    config = ElsaaConfig(**SMALL, fusion=FusionConfig(lambda_kind=kind))
    layer, variables = make(config=config)
    _, state = layer.apply(variables, X, sow_weights=True, mutable=["intermediates"])
    lam = state["intermediates"]["lam"][0]
    chex.assert_shape(lam, (2, 50, 4))
    np.testing.assert_allclose(lam, 0.8 if kind == "query" else 1.0, atol=0.02)
    if kind != "query":
        return
    # c stays at or above 0, and the clamp passes the gradient through; q is detached.
    params = dict(variables["params"])
    params["lambda_offset"] = jnp.full((4,), -5.0)
    variables = {**variables, "params": params}

    def loss(params):
        return jnp.sum(layer.apply({**variables, "params": params}, X) ** 2)

    _, state = layer.apply(variables, X, sow_weights=True, mutable=["intermediates"])
    np.testing.assert_allclose(state["intermediates"]["lam"][0], 0.5, atol=0.02)
    grads = jax.grad(loss)(params)
    assert np.abs(grads["lambda_offset"]).min() > 0


def test_lambda_and_masses_are_detached():
    config = ElsaaConfig(**SMALL, fusion=FusionConfig(lambda_kind="query"))
    _, variables = make(config=config)
    query = jax.random.normal(jax.random.key(2), (1, 5, 4, 8))
    names = ("lambda_kernel", "lambda_bias", "lambda_offset")
    grad = jax.grad(lambda q: query_lambda(q, *(variables["params"][n] for n in names)).sum())(query)
    np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("gate_input", ["input", "query"])
def test_gates(gate_input):
    config = ElsaaConfig(**SMALL, fusion=FusionConfig(gate_input=gate_input, gate_hidden=12))
    layer, variables = make(config=config)
    features = 32 if gate_input == "input" else 8
    chex.assert_shape(variables["params"]["gate"]["hidden"]["kernel"], (features, 12))
    _, state = layer.apply(variables, X, sow_weights=True, mutable=["intermediates"])
    gate = state["intermediates"]["gate_sparse"][0]
    chex.assert_shape(gate, (2, 50, 4))
    assert float(gate.min()) > 0
    assert float(gate.max()) < 1
    shared_by_heads = bool(jnp.all(gate == gate[..., :1]))
    assert shared_by_heads == (gate_input == "input")


def test_beta_is_learned_within_its_range():
    layer, variables = make("race")
    grads = jax.grad(lambda v: jnp.sum(layer.apply(v, X) ** 2))(variables)
    assert abs(float(grads["params"]["log_beta"])) > 0
    for log_beta, same in ((10.0, np.log(20.0)), (-10.0, np.log(0.01))):
        outs = [
            layer.apply({**variables, "params": {**variables["params"], "log_beta": jnp.float32(b)}}, X)
            for b in (log_beta, same)
        ]
        chex.assert_trees_all_close(*outs, atol=1e-5)


def test_sown_multiplier_is_that_of_the_fusion():
    layer, variables = make(is_causal=True)
    _, state = layer.apply(variables, X, sow_weights=True, mutable=["intermediates"])
    sown = {name: value[0] for name, value in state["intermediates"].items()}
    assert set(sown) == {
        "gate_sparse", "gate_low_rank", "lam", "multiplier", "sparse_log_mass", "low_rank_log_mass",
    }  # fmt: skip
    expected = elsaa_jax.sparse_multiplier(sown["sparse_log_mass"], sown["low_rank_log_mass"], lam=sown["lam"])
    chex.assert_trees_all_close(sown["multiplier"], expected)


def test_dropout_acts_on_the_output():
    layer, variables = make(dropout_rate=0.5)
    still = layer.apply(variables, X, deterministic=True)
    rngs = {"dropout": jax.random.key(3)}
    dropped = layer.apply(variables, X, deterministic=False, rngs=rngs)
    chex.assert_trees_all_equal(dropped, layer.apply(variables, X, deterministic=False, rngs=rngs))
    assert np.abs(still - dropped).max() > 0.01
    # In expectation it changes nothing.
    runs = [layer.apply(variables, X, deterministic=False, dropout_rng=jax.random.key(s)) for s in range(200)]
    assert float(jnp.abs(jnp.mean(jnp.stack(runs), axis=0) - still).mean()) < 0.15 * float(jnp.abs(still).mean()) + 0.02
    with pytest.raises(Exception, match="deterministic"):
        layer.apply(variables, X)


def test_branch_dropout_switches_off_that_share_of_a_batch():
    config = ElsaaConfig(**SMALL, fusion=FusionConfig(branch_dropout_rate=0.25, kind="convex"))
    layer = ELSAA(num_heads=4, config=config)
    x = jax.random.normal(jax.random.key(0), (8, 50, 32))
    variables = layer.init(jax.random.key(1), x, deterministic=True)
    off = []
    for seed in range(3):
        _, state = layer.apply(
            variables,
            x,
            deterministic=False,
            rngs={"dropout": jax.random.key(seed)},
            sow_weights=True,
            mutable=["intermediates"],
        )
        multiplier = state["intermediates"]["multiplier"][0]
        off.append(np.asarray((multiplier == 0).all(axis=(1, 2))))
        assert off[-1].sum() == 2
    assert len({tuple(x) for x in off}) > 1
    _, state = layer.apply(variables, x, deterministic=True, sow_weights=True, mutable=["intermediates"])
    assert float(state["intermediates"]["multiplier"][0].min()) > 0


def test_short_convolution():
    config = ElsaaConfig(**SMALL, short_conv=3)
    plain, plain_variables = make("exact", CONFIG, is_causal=True)
    layer, variables = make("exact", config, is_causal=True)
    identity = jnp.zeros((3, 4, 8)).at[0].set(1.0)
    convolutions = dict.fromkeys(("query_conv", "key_conv", "value_conv"), identity)
    assert 0.4 < float(jnp.std(variables["params"]["value_conv"])) < 0.8  # 1 / sqrt(taps)
    variables = {"params": {**convolutions, **plain_variables["params"]}}
    chex.assert_trees_all_close(layer.apply(variables, X), plain.apply(plain_variables, X), atol=1e-6)
    taps = jax.random.normal(jax.random.key(0), (3, 4, 8))
    variables["params"]["key_conv"] = taps
    x = jax.random.normal(jax.random.key(1), (2, 6, 4, 8))
    expected = np.zeros(x.shape)
    for t in range(6):
        for j in range(min(3, t + 1)):
            expected[:, t] += np.asarray(taps)[j] * np.asarray(x)[:, t - j]
    np.testing.assert_allclose(short_convolution(x, taps, None), expected, atol=1e-5)
    np.testing.assert_allclose(short_convolution(x[:, 4:], taps, None, x[:, 2:4]), expected[:, 4:], atol=1e-5)
    # The last queries see the tokens before them, as if all had been asked.
    variables["params"]["query_conv"] = taps[::-1]
    # Masked tokens count as 0, also among those before the first query.
    for mask in (None, jnp.arange(50)[None, :] >= jnp.asarray([[0], [42]])):
        whole = layer.apply(variables, X, mask=mask)
        chex.assert_trees_all_close(layer.apply(variables, X[:, -7:], X, mask=mask), whole[:, -7:], atol=1e-5)


def test_rotary_positions():
    layer, variables = make("exact", ElsaaConfig(rotary_base=100.0), is_causal=True)
    x = X[:1, :1].repeat(50, axis=1).at[:, 20].set(X[0, 20]).at[:, 40].set(X[0, 20])
    log_mass = layer.apply(variables, x, sow_weights=True, mutable="intermediates")[1]["intermediates"]["log_mass"][0]
    assert np.ptp(log_mass[0, 1:20] - np.log(np.arange(2, 21))[:, None]) > 1e-3  # Equal tokens, other places.
    # Only distances count: q at i and k at j as q at i + 7 and k at j + 7.
    spec = AttentionSpec("exact", ElsaaConfig(rotary_base=100.0), 1, 1, 8, True, None)
    query, key = (jax.random.normal(jax.random.key(i), (1, 1, 1, 8)) for i in (0, 1))
    logits = jnp.einsum("bqnh,bknh->qk", *rotate(spec, query.repeat(20, axis=1), key.repeat(20, axis=1)))
    np.testing.assert_allclose(logits[5, 3], logits[12, 10], atol=1e-5)
    assert abs(logits[5, 3] - logits[5, 4]) > 1e-3
    chex.assert_trees_all_close(layer.apply(variables, X[:, -7:], X), layer.apply(variables, X)[:, -7:], atol=1e-5)
    with pytest.raises(ValueError, match=r"the head dimension is 7; with ElsaaConfig.rotary_base it must be even"):
        ELSAA(num_heads=1, qkv_features=7, config=ElsaaConfig(rotary_base=100.0))


@pytest.mark.parametrize(
    ("attention", "is_causal"), [*((kind, True) for kind in elsaa_jax.ATTENTION_KINDS), ("elsaa", False)]
)
def test_padding_does_not_reach_valid_tokens(attention, is_causal):
    layer, variables = make(attention, ElsaaConfig(**SMALL, short_conv=2), is_causal=is_causal, num_kv_heads=2)
    mask = jnp.arange(50)[None, :] < jnp.asarray([[50], [37]])
    padded = jnp.where(mask[..., None], X, 100.0)
    out = jax.jit(lambda x, m: layer.apply(variables, x, mask=m))(padded, mask)
    alone = layer.apply(variables, X[1:, :37])
    chex.assert_trees_all_close(out[1:, :37], alone, atol=1e-5)


def test_query_mask():
    layer, variables = make("sort_lsh")
    mask = jnp.arange(50)[None, :] < jnp.asarray([[50], [37]])
    expected = layer.apply(variables, X, mask=mask)
    # The same array twice is not known to be one beyond jit: there the mask of the queries is given.
    run = jax.jit(lambda q, k: layer.apply(variables, q, k, mask=mask, query_mask=mask))
    chex.assert_trees_all_close(run(X, X), expected, atol=1e-5)


def test_batch_axes_and_dtypes():
    layer, variables = make(is_causal=True)
    out = layer.apply(variables, X)
    chex.assert_trees_all_close(layer.apply(variables, X[:, None])[:, 0], out, atol=1e-6)
    chex.assert_trees_all_close(layer.apply(variables, X[0]), out[0], atol=1e-5)
    half = ELSAA(num_heads=4, config=CONFIG, is_causal=True, dtype=jnp.bfloat16)
    half_out = half.apply(variables, X)
    chex.assert_type(half_out, jnp.bfloat16)
    assert float(jnp.abs(half_out.astype(jnp.float32) - out).mean()) < 0.05 * float(jnp.abs(out).max())


def test_it_trains():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(16, 32)(tokens)
            x = x + ELSAA(num_heads=4, is_causal=True, config=ElsaaConfig(**SMALL, short_conv=2))(nn.LayerNorm()(x))
            return nn.Dense(16)(nn.LayerNorm()(x))

    # The token after its own last occurrence: period-10 sequences.
    tokens = jnp.tile(jax.random.randint(jax.random.key(0), (16, 10), 0, 16), (1, 4))
    model = Model()
    variables = model.init(jax.random.key(1), tokens)
    params, hashes = variables["params"], variables["hashes"]
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = model.apply({"params": params, "hashes": hashes}, tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses[:, 10:].mean()

        value, grads = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers.
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    losses = []
    for _ in range(120):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[0] > 2.5
    assert losses[-1] < 0.7, losses[-1]


def to_nnx(layer, params):
    """Copies the parameters of the linen layer into its twin."""
    for name, value in params.items():
        if isinstance(value, dict):
            to_nnx(getattr(layer, name), value)
        else:
            getattr(layer, name)[...] = value


@pytest.mark.parametrize("attention", elsaa_jax.ATTENTION_KINDS)
def test_the_nnx_twin_equals_the_linen_layer(attention):
    fusion = FusionConfig(lambda_kind="query", gate_input="query")
    config = ElsaaConfig(**SMALL, fusion=fusion, short_conv=2, rotary_base=100.0)
    layer, variables = make(attention, config, is_causal=True, num_kv_heads=2, normalize_qk=True)
    twin = elsaa_nnx.ELSAA(
        4,
        32,
        num_kv_heads=2,
        attention=attention,
        config=config,
        is_causal=True,
        normalize_qk=True,
        rngs=nnx.Rngs(0),
    )
    to_nnx(twin, variables["params"])
    to_nnx(twin, variables.get("hashes", {}))
    mask = jnp.arange(50)[None, :] < jnp.asarray([[50], [37]])
    chex.assert_trees_all_close(twin(X, mask=mask), layer.apply(variables, X, mask=mask), atol=1e-5)
    chex.assert_trees_all_close(twin(X[:, -9:], X), layer.apply(variables, X[:, -9:], X), atol=1e-5)
    params = nnx.state(twin, nnx.Param)
    assert set(params) == set(variables["params"])
    assert set(nnx.state(twin, elsaa_nnx.HashPlanes)) == set(variables.get("hashes", {}))


def test_the_nnx_twin_trains_and_drops():
    config = ElsaaConfig(**SMALL, fusion=FusionConfig(branch_dropout_rate=0.5))
    layer = elsaa_nnx.ELSAA(4, 32, config=config, dropout_rate=0.2, rngs=nnx.Rngs(0))

    @nnx.jit
    def gradient(layer):
        return nnx.grad(lambda m: jnp.sum(m(X, deterministic=False) ** 2))(layer)

    chex.assert_tree_all_finite(nnx.to_pure_dict(gradient(layer)))
    first, second = layer(X, deterministic=False), layer(X, deterministic=False)
    assert np.abs(first - second).max() > 0
    _, sown = nnx.capture(layer, nnx.Intermediate)(X, deterministic=True, sow_weights=True)
    chex.assert_shape(sown["multiplier"][0], (2, 50, 4))
    with pytest.raises(ValueError, match="deterministic is None"):
        layer(X)


@pytest.mark.parametrize("attention", elsaa_jax.ATTENTION_KINDS)
def test_hooks_of_flax_layers(attention):
    hashes = elsaa_jax.sample_hashes(jax.random.key(0), 8, attention, config=CONFIG)
    hook = elsaa_jax.attention_fn(hashes, attention, config=CONFIG, is_causal=True)
    mask = (jnp.arange(50)[None, :] < jnp.asarray([[50], [37]]))[:, None, None, :]
    layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=hook)
    variables = layer.init(jax.random.key(1), X)
    out, state = layer.apply(variables, X, mask=mask, sow_weights=True, mutable=["intermediates"])
    assert state["intermediates"]
    # The mask arrives: what stands in the padding does not matter.
    other = layer.apply(variables, jnp.where(mask[:, 0, 0, :, None], X, 5.0), mask=mask)
    chex.assert_trees_all_close(out[1, :37], other[1, :37], atol=1e-5)

    twin = nnx.MultiHeadAttention(4, 32, attention_fn=hook, decode=False, rngs=nnx.Rngs(0))
    for name in ("query", "key", "value", "out"):
        for part in ("kernel", "bias"):
            getattr(getattr(twin, name), part)[...] = variables["params"][name][part]
    chex.assert_trees_all_close(twin(X, mask=mask), out, atol=1e-5)


def test_hooks_refuse_a_mask_over_pairs_and_drop_the_output():
    hashes = elsaa_jax.sample_hashes(jax.random.key(0), 8, config=CONFIG)
    layer = nn.MultiHeadDotProductAttention(
        num_heads=4, attention_fn=elsaa_jax.attention_fn(hashes, config=CONFIG), dropout_rate=0.5
    )
    variables = layer.init(jax.random.key(1), X, deterministic=True)
    with pytest.raises(ValueError, match="is_causal"):
        layer.apply(variables, X, mask=nn.make_causal_mask(X[..., 0]), deterministic=True)
    outs = [layer.apply(variables, X, deterministic=False, rngs={"dropout": jax.random.key(s)}) for s in (0, 1)]
    assert np.abs(outs[0] - outs[1]).max() > 0
