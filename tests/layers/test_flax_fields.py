"""Fields that the linen layer takes from `nn.MultiHeadDotProductAttention`, and their effect."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from elsaa_jax import ELSAA
from elsaa_jax import nnx as elsaa_nnx

HEADS, HEAD_DIM, LENGTH = 2, 8, 6
FEATURES = HEADS * HEAD_DIM
# The kernel with which the last projection returns its input, the attention's output, unchanged.
IDENTITY = jnp.eye(FEATURES).reshape(HEADS, HEAD_DIM, FEATURES)
X = jax.random.normal(jax.random.key(0), (3, LENGTH, FEATURES))


def make(**fields):
    layer = ELSAA(HEADS, attention="exact", **fields)
    variables = layer.init(jax.random.key(1), X, deterministic=True)
    return layer, variables


def dropped(out):
    """Returns where an output (B, T, features) of the last projection's input is 0, as (B, T, N, H)."""
    return np.asarray(out == 0).reshape(*out.shape[:2], HEADS, HEAD_DIM)


@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_broadcast_dropout_has_one_mask_for_all_examples_and_heads(framework, broadcast):
    fields = {"dropout_rate": 0.5, "broadcast_dropout": broadcast}
    if framework == "linen":
        layer, variables = make(**fields)
        params = {**variables["params"], "out": {**variables["params"]["out"], "kernel": IDENTITY}}
        out = layer.apply({"params": params}, X, deterministic=False, rngs={"dropout": jax.random.key(2)})
    else:
        layer = elsaa_nnx.ELSAA(HEADS, FEATURES, attention="exact", **fields, rngs=nnx.Rngs(0))
        layer.out.kernel[...] = IDENTITY
        out = layer(X, deterministic=False)
    zeros = dropped(out)
    assert 0.2 < zeros.mean() < 0.8
    same = zeros == zeros[:1, :, :1]
    assert same.all() == broadcast
    # Tokens and channels have masks of their own.
    assert not (zeros == zeros[:, :1]).all()
    assert not (zeros == zeros[..., :1]).all()


class Counter:
    """A dot product that counts its calls and doubles its result."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return 2 * jax.lax.dot_general(*args, **kwargs)


def doubled(variables, names):
    """Returns the variables with the kernels of some projections doubled."""
    params = dict(variables["params"])
    for name in names:
        params[name] = {**params[name], "kernel": 2 * params[name]["kernel"]}
    return {"params": params}


@pytest.mark.parametrize("is_class", [False, True], ids=["function", "class"])
@pytest.mark.parametrize(
    ("field", "names"), [("qkv_dot_general", ("query", "key", "value")), ("out_dot_general", ("out",))]
)
def test_dot_general_computes_the_projections(field, names, is_class):
    plain, variables = make()
    product = Counter()
    fields = {f"{field}_cls": lambda: product} if is_class else {field: product}
    out = ELSAA(HEADS, attention="exact", **fields).apply(variables, X)
    assert product.calls == len(names)
    np.testing.assert_allclose(out, plain.apply(doubled(variables, names), X), atol=1e-5)
    # Flax's own layer does the same with the field.
    theirs = nn.MultiHeadDotProductAttention(HEADS, **fields).apply(variables, X)
    np.testing.assert_allclose(out, theirs, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_softmax_is_in_float32_with_and_without_the_field(dtype):
    outs = []
    for force in (False, True):
        layer = ELSAA(HEADS, attention="exact", dtype=dtype, force_fp32_for_softmax=force)
        outs.append(layer.apply(make()[1], X.astype(dtype)))
    assert outs[0].dtype == dtype
    np.testing.assert_array_equal(*(np.asarray(out, np.float32) for out in outs))
    theirs = nn.MultiHeadDotProductAttention(HEADS, dtype=dtype, force_fp32_for_softmax=True)
    with jax.numpy_dtype_promotion("standard"):
        expected = theirs.apply(make()[1], X.astype(dtype))
    np.testing.assert_allclose(np.asarray(outs[0], np.float32), np.asarray(expected, np.float32), atol=0.02)
