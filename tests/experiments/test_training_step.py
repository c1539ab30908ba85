"""A training step on a long sequence fits in memory."""

import jax
import jax.numpy as jnp
import optax
import pytest

from elsaa_jax import ElsaaConfig, SortLshConfig
from experiments.engine import models


@pytest.mark.slow
def test_65536_tokens_in_12_gib():
    sizes = models.ModelConfig(width=256, num_layers=4, num_heads=4, mlp_width=1024)
    config = ElsaaConfig(sparse=SortLshConfig(num_bits=12, block_size=64, min_length=256))
    model = models.Decoder(sizes, 179, "elsaa", config)
    variables = models.init(model, jax.random.key(0))
    optimizer = optax.adamw(1e-3)

    def step(params, state, tokens):
        def loss(params):
            logits = models.apply(model, variables | {"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(variables["params"])
    tokens = jax.ShapeDtypeStruct((1, 65_537), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        memory = jax.jit(step).lower(variables["params"], state, tokens).compile().memory_analysis()
    gib = (memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes) / 2**30
    print(f"\na step on 65,536 tokens, 4 layers, width 256: {gib:.2f} GiB")
    assert gib < 12
