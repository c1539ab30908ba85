"""Bad input is refused by a ValueError that names the argument, its value and what is allowed."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import elsaa_jax
from elsaa_jax import ElsaaConfig, FusionConfig, RaceConfig, SortLshConfig
from elsaa_jax import nnx as elsaa_nnx

X = jnp.ones((2, 8, 4, 16))
KV = jnp.ones((2, 8, 2, 16))
WIDE = {"q": jnp.ones((2, 8, 4, 128)), "k": jnp.ones((2, 8, 2, 128)), "v": jnp.ones((2, 8, 2, 128))}
HALF = KV.astype(jnp.float16)
THREE = jnp.ones((2, 8, 3, 16))
PLANES = jnp.ones((5, 16))
TABLES = jnp.ones((3, 3, 16))
PROJECTION = jnp.ones((24, 16))
MASK = jnp.ones((2, 8), bool)

CALLS = {
    "exact_attention": lambda q=X, k=KV, v=KV, **kw: elsaa_jax.exact_attention(q, k, v, **kw),
    "race_attention": lambda q=X, k=KV, v=KV, planes=TABLES, **kw: elsaa_jax.race_attention(q, k, v, planes, **kw),
    "sort_lsh_attention": lambda q=X, k=KV, v=KV, planes=PLANES, **kw: elsaa_jax.sort_lsh_attention(
        q, k, v, planes, **kw
    ),
    "performer_attention": lambda q=X, k=KV, v=KV, projection=PROJECTION, **kw: elsaa_jax.performer_attention(
        q, k, v, projection, **kw
    ),
    "elsaa_attention": lambda q=X, k=KV, v=KV, race_planes=TABLES, **kw: elsaa_jax.elsaa_attention(
        q, k, v, race_planes=race_planes, **kw
    ),
}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"q": X[0]}, r"query has shape \(8, 4, 16\); it must be \(B, T, N, H\)"),
        ({"k": KV[0]}, r"key has shape \(8, 2, 16\); it must be \(B, S, K, H\)"),
        ({"q": X[:, :0]}, r"query has shape \(2, 0, 4, 16\).*no empty axis"),
        ({"q": X.astype(jnp.int32)}, "query has dtype int32; it must be one of float32, bfloat16, float16"),
        ({"q": X.astype(jnp.bfloat16)}, "dtypes bfloat16, float32 and float32; they must be equal"),
        ({"v": KV[:, :4]}, r"key has shape \(2, 8, 2, 16\) and value \(2, 4, 2, 16\)"),
        ({"q": X[:1]}, "batch and head dimension must be equal"),
        ({"k": THREE, "v": THREE}, "query has 4 heads and key 3; the first must be a multiple"),
        ({"q": jnp.ones((2, 9, 4, 16)), "is_causal": True}, "query has length 9 and key 8; with is_causal=True"),
        ({"key_mask": jnp.ones((2, 8, 8), bool)}, r"key_mask has shape \(2, 8, 8\).*is_causal.*key_mask"),
        ({"key_mask": MASK.astype(jnp.float32)}, "key_mask has dtype float32; it must be bool"),
        ({"is_causal": 1}, "is_causal is 1; it must be True or False"),
        ({"q": X.tolist()}, "query is a list; it must be an array: use jnp.asarray"),
        ({"k": KV.tolist()}, "key is a list; it must be an array: use jnp.asarray"),
        ({"v": KV.tolist()}, "value is a list; it must be an array: use jnp.asarray"),
        ({"key_mask": MASK.tolist()}, "key_mask is a list; it must be an array: use jnp.asarray"),
    ],
)  # fmt: skip
def test_arrays(function, kwargs, message):
    with pytest.raises(ValueError, match=message):
        CALLS[function](**kwargs)


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        ("exact_attention", {"implementation": "cuda"}, "implementation is 'cuda'; it must be one of None, 'xla'"),
        ("exact_attention", {"implementation": "pallas"}, "'pallas', which runs on a GPU.*cpu; use 'interpret'"),
        ("race_attention", {"implementation": "pallas"}, "'pallas', which runs on a GPU.*cpu; use 'interpret'"),
        ("sort_lsh_attention", {"implementation": "pallas"}, "'pallas', which runs on a GPU.*cpu; use 'interpret'"),
        ("exact_attention", {"q": X.astype(jnp.float16), "k": HALF, "v": HALF, "implementation": "interpret"},
         "'interpret', but the kernels take bfloat16 and float32, not float16; use None or 'xla'"),
        ("exact_attention", {"q": X[..., :8], "k": KV[..., :8], "v": KV[..., :8], "implementation": "interpret"},
         "head dimensions 16, 32, 64, 128, not 8"),
        ("race_attention", {"planes": jnp.ones((4, 5, 16)), "implementation": "interpret"},
         "at most 64 buckets.*not 128"),
        ("race_attention", {**WIDE, "planes": jnp.ones((3, 3, 128)), "implementation": "interpret"},
         "head dimensions up to 64, not 128"),
        ("exact_attention", {"scale": float("nan")}, "scale is nan; it must be a finite number"),
        ("sort_lsh_attention", {"block_size": 0}, "block_size is 0; it must be an integer >= 1"),
        ("sort_lsh_attention", {"block_size": -8}, "block_size is -8"),
        ("sort_lsh_attention", {"block_size": 2.5}, "block_size is 2.5"),
        ("sort_lsh_attention", {"min_length": -1}, "min_length is -1; it must be an integer >= 0"),
        ("sort_lsh_attention", {"num_neighbors": -1}, "num_neighbors is -1"),
        ("sort_lsh_attention", {"pairing": "hash"}, "pairing is 'hash'; it must be one of None, 'rank', 'bucket'"),
        ("sort_lsh_attention", {"query_mask": MASK[:, :3]}, r"query_mask has shape \(2, 3\)"),
        ("sort_lsh_attention", {"planes": PLANES[:, :3]}, r"planes has shape \(5, 3\); it must be \(bits, 16\)"),
        ("sort_lsh_attention", {"planes": jnp.ones((3, 5, 16))}, r"planes has shape \(3, 5, 16\).*\(2, bits, 16\)"),
        ("sort_lsh_attention", {"planes": jnp.ones((31, 16))}, "bits of the planes is 31; .* from 1 to 30"),
        ("race_attention", {"planes": PLANES}, r"planes has shape \(5, 16\); it must be \(tables, bits, 16\)"),
        ("race_attention", {"num_ensembles": 2}, "num_ensembles is 2; it must divide the 3 tables"),
        ("race_attention", {"beta": 0.0}, "beta is 0.0; it must be a finite number > 0"),
        ("race_attention", {"beta": jnp.ones(3)}, r"beta has shape \(3,\); it must be a scalar"),
        ("race_attention", {"chunk_size": 0}, "chunk_size is 0"),
        ("race_attention", {"eps": -1.0}, "eps is -1.0; it must be a finite number >= 0"),
        ("performer_attention", {"projection": TABLES}, r"projection has shape \(3, 3, 16\); it must"),
        ("elsaa_attention", {"config": 3}, "config is 3; it must be a ElsaaConfig"),
        ("elsaa_attention", {"lam": jnp.ones((2, 8, 3))}, r"lam has shape \(2, 8, 3\); it must broadcast"),
        ("elsaa_attention", {"gate_sparse": jnp.ones(7)}, r"gate_sparse has shape \(7,\)"),
        ("elsaa_attention", {"lsh_planes": PLANES[:, :3]}, r"planes has shape \(5, 3\); it must be \(bits, 16\)"),
        ("elsaa_attention", {"lam": -1.0}, r"lam has the smallest value -1\.0; all must be finite numbers >= 0"),
        ("elsaa_attention", {"gate_low_rank": float("nan")}, "gate_low_rank has the smallest value nan"),
        ("sort_lsh_attention", {"query_mask": MASK.tolist()}, "query_mask is a list; .* use jnp.asarray"),
        ("sort_lsh_attention", {"planes": PLANES.tolist()}, "planes is a list; .* use jnp.asarray"),
        ("sort_lsh_attention", {"planes": PLANES.at[1, 2].set(jnp.nan)}, "planes has values that are NaN or infinite"),
        ("race_attention", {"planes": TABLES.tolist()}, "planes is a list; .* use jnp.asarray"),
        ("race_attention", {"planes": TABLES.at[0, 1, 2].set(jnp.nan)}, "planes has values that are NaN or infinite"),
        ("performer_attention", {"projection": PROJECTION.tolist()}, "projection is a list; .* use jnp.asarray"),
        ("performer_attention", {"projection": PROJECTION * jnp.inf}, "projection has values that are NaN or infinite"),
        ("elsaa_attention", {"race_planes": TABLES.tolist()}, "planes is a list; .* use jnp.asarray"),
        ("elsaa_attention", {"race_planes": TABLES * jnp.nan}, "planes has values that are NaN or infinite"),
        ("elsaa_attention", {"lsh_planes": PLANES * jnp.nan}, "lsh_planes has values that are NaN or infinite"),
        ("elsaa_attention", {"race_planes": TABLES[:1]}, "num_bits is 5, but the low-rank branch has only 3 planes"),
    ],
)  # fmt: skip
def test_arguments(function, kwargs, message):
    with pytest.raises(ValueError, match=message):
        CALLS[function](**kwargs)


def test_unknown_fusion():
    branch = elsaa_jax.exact_attention(X, KV, KV)
    with pytest.raises(ValueError, match="kind is 'mean'; it must be one of 'elsaa', 'convex', 'sum', 'lse'"):
        elsaa_jax.fuse(branch, branch, kind="mean")
    with pytest.raises(ValueError, match="first has out of shape"):
        elsaa_jax.merge(elsaa_jax.BranchOutput(branch.out, branch.log_mass[:, :3]), branch)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (RaceConfig, "num_tables", 0),
        (RaceConfig, "num_bits", 13),
        (RaceConfig, "num_ensembles", -1),
        (RaceConfig, "beta", 0.0),
        (RaceConfig, "learn_beta", 1),
        (RaceConfig, "chunk_size", 0),
        (SortLshConfig, "num_bits", 31),
        (SortLshConfig, "block_size", 0),
        (SortLshConfig, "min_length", -1),
        (SortLshConfig, "num_neighbors", 0.5),
        (SortLshConfig, "pairing", "random"),
        (FusionConfig, "kind", "max"),
        (FusionConfig, "lambda_kind", "vector"),
        (FusionConfig, "lambda_init", -1.0),
        (FusionConfig, "gate_hidden", 0),
        (FusionConfig, "gate_input", "key"),
        (FusionConfig, "eps", float("inf")),
        (FusionConfig, "stop_gradient_mass", None),
        (FusionConfig, "mass_scale", "sum"),
        (FusionConfig, "branch_dropout_rate", 1.5),
        (ElsaaConfig, "race", None),
        (ElsaaConfig, "sparse", RaceConfig()),
        (ElsaaConfig, "fusion", "elsaa"),
        (ElsaaConfig, "share_planes", "yes"),
        (ElsaaConfig, "short_conv", -1),
        (ElsaaConfig, "rotary_base", -1.0),
        (ElsaaConfig, "performer_features", 0),
    ],
)
def test_configs(config, field, value):
    with pytest.raises(ValueError, match=rf"{config.__name__}\.{field} is .*; it must be"):
        config(**{field: value})


def test_configs_are_frozen_and_hashable():
    assert len({ElsaaConfig(), ElsaaConfig(), ElsaaConfig(short_conv=3)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        ElsaaConfig().short_conv = 4


def test_hooks():
    with pytest.raises(ValueError, match=r"hashes has \['projection'\], but attention='race' needs 'race_planes'"):
        elsaa_jax.attention_fn({"projection": PROJECTION}, "race")
    with pytest.raises(ValueError, match=r"config.short_conv is 3, but belongs to the layer ELSAA"):
        elsaa_jax.attention_fn({"race_planes": TABLES}, config=ElsaaConfig(short_conv=3))
    with pytest.raises(ValueError, match=r"config.rotary_base is 10.0, but belongs to the layer ELSAA"):
        elsaa_jax.attention_fn({"race_planes": TABLES}, config=ElsaaConfig(rotary_base=10.0))


def test_configs_refuse_what_does_not_go_together():
    with pytest.raises(ValueError, match=r"RaceConfig.beta is 50; where it is learned it must lie within"):
        RaceConfig(beta=50)
    assert RaceConfig(beta=50, learn_beta=False).beta == 50
    with pytest.raises(ValueError, match=r"lambda_init is 2\.0, but lambda_kind='query' starts"):
        FusionConfig(lambda_kind="query", lambda_init=2.0)
    with pytest.raises(ValueError, match="num_bits is 20, but the low-rank branch has only 16 planes"):
        ElsaaConfig(sparse=SortLshConfig(num_bits=20), share_planes=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads = 4"),
        ({"qkv_features": 30}, "qkv_features is 30; it must be a multiple of num_heads = 4"),
        ({"attention": "linear"}, "attention is 'linear'; it must be one of 'elsaa', 'race'"),
        ({"implementation": "cuda"}, "implementation is 'cuda'"),
        ({"attention_fn": jnp.dot}, "attention_fn is .* but this layer is the attention"),
        ({"decode": True}, "decode is True, but decoding"),
        ({"dropout_rate": 1.0}, "dropout_rate is 1.0; it must be a number >= 0 and < 1"),
        ({"config": {}}, "config is {}; it must be a ElsaaConfig"),
        ({"is_causal": None}, "is_causal is None; it must be True or False"),
    ],
)
def test_layers(fields, message):
    fields = {"num_heads": 4, **fields}
    with pytest.raises(ValueError, match=message):
        elsaa_jax.ELSAA(**fields)
    with pytest.raises(ValueError, match=message):
        elsaa_nnx.ELSAA(**fields, in_features=32, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("field", ["qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"])
def test_linen_refuses_einsum_classes(field):
    with pytest.raises(ValueError, match=f"{field} is .* but there is no matrix of attention weights"):
        elsaa_jax.ELSAA(num_heads=4, **{field: jnp.einsum})


@pytest.mark.parametrize(
    ("shape", "allowed"),
    [
        ((2, 1, 8, 8), False),
        ((2, 4, 1, 8), False),
        ((2, 8, 8), False),
        ((3, 8), False),
        ((2, 8), True),
        ((1, 1, 1, 8), True),
    ],
)
def test_masks_of_layers(shape, allowed):
    layer = elsaa_jax.ELSAA(num_heads=4, attention="exact")
    x = jnp.ones((2, 8, 32))
    variables = layer.init(jax.random.key(0), x)
    if allowed:
        layer.apply(variables, x, mask=jnp.ones(shape))
    else:
        with pytest.raises(ValueError, match=r"mask has shape .* it must be .*key_mask.*is_causal"):
            layer.apply(variables, x, mask=jnp.ones(shape))


LISTS = [[[1.0] * 32] * 8] * 2
TOKENS = jnp.ones((2, 8, 32))


@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("inputs", "masks", "message"),
    [
        ((TOKENS[:, :0],), {}, r"inputs_q has shape \(2, 0, 32\)"),
        ((TOKENS, TOKENS[:, :0]), {}, r"inputs_k has shape \(2, 0, 32\)"),
        ((TOKENS, TOKENS, TOKENS[:, :0]), {}, r"inputs_v has shape \(2, 0, 32\)"),
        ((TOKENS[:0],), {}, r"has shape \(0, 8, "),
        ((LISTS,), {}, "inputs_q is a list; it must be an array: use jnp.asarray"),
        ((TOKENS, LISTS), {}, "inputs_k is a list; it must be an array: use jnp.asarray"),
        ((TOKENS, TOKENS, LISTS), {}, "inputs_v is a list; it must be an array: use jnp.asarray"),
        ((TOKENS, None, LISTS), {}, "inputs_v is a list; it must be an array: use jnp.asarray"),
        ((TOKENS,), {"mask": MASK.tolist()}, "^mask is a list; it must be an array: use jnp.asarray"),
        ((TOKENS,), {"query_mask": MASK.tolist()}, "^query_mask is a list; it must be an array: use jnp.asarray"),
        ((TOKENS,), {"query_mask": MASK[:, :3]}, r"^query_mask has shape \(2, 3\)"),
    ],
)
def test_inputs_of_layers(framework, inputs, masks, message):
    if framework == "linen":
        layer = elsaa_jax.ELSAA(4, attention="exact")
        attend = functools.partial(layer.init, jax.random.key(0))
    else:
        attend = elsaa_nnx.ELSAA(4, 32, attention="exact", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        attend(*inputs, **masks)


@pytest.mark.parametrize("function", CALLS)
def test_symbolic_batches_need_vmap(function):
    (batch,) = jax.export.symbolic_shape("b")
    struct = jax.ShapeDtypeStruct((batch, 8, 2, 16), jnp.float32)

    def attend(x):
        return jax.tree.leaves(CALLS[function](x, x, x))[0]

    with pytest.raises(ValueError, match=r"symbolic dimension b; .*`jax\.vmap`"):
        jax.export.export(jax.jit(attend))(struct)
    exported = jax.export.export(jax.jit(jax.vmap(lambda x: attend(x[None])[0])))(struct)
    x = jax.random.normal(jax.random.key(0), (3, 8, 2, 16))
    np.testing.assert_allclose(exported.call(x), attend(x), atol=1e-5)


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("shape", [(2, "n", 2, 16), (2, 8, "n", 16)], ids=["length", "heads"])
def test_symbolic_lengths_are_refused(function, shape):
    (size,) = jax.export.symbolic_shape("n")
    struct = jax.ShapeDtypeStruct([size if x == "n" else x for x in shape], jnp.float32)
    with pytest.raises(ValueError, match=r"symbolic dimension n; it must be a number"):
        jax.export.export(jax.jit(lambda x: jax.tree.leaves(CALLS[function](x, x, x))[0]))(struct)


@pytest.mark.parametrize("attention", elsaa_jax.ATTENTION_KINDS)
def test_layers_fail_loudly_without_a_gpu(attention):
    layer = elsaa_jax.ELSAA(num_heads=2, attention=attention, implementation="pallas")
    reason = "has no Pallas kernel" if attention == "performer" else "runs on a GPU"
    with pytest.raises(ValueError, match=f"implementation is 'pallas', .* {reason}"):
        layer.init(jax.random.key(0), jnp.ones((2, 8, 32)))
