"""One step: the same gradient however the batch is split."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.engine.errors import EngineError
from experiments.engine.optimizer import learning_rate
from experiments.engine.parallel import check_batch_size, make_parallel
from experiments.engine.step import init_state, make_batch, make_step
from tests.experiments.engine.helpers import assert_close
from tests.experiments.engine.toy import STAGES, ToyTask, toy_config


def first_steps(config, kind="jit", num_devices=1, steps=2):
    """The state and the metrics after some steps, in NumPy arrays."""
    parallel = make_parallel(kind, jax.devices()[:num_devices])
    state = parallel.put_state(jax.tree.map(np.array, init_state(config)))
    run_step = parallel.compile(make_step(config))
    for step in range(steps):
        state, metrics = run_step(state, parallel.put_batch(make_batch(config, step)))
    return parallel.fetch(state), parallel.fetch(metrics)


@pytest.fixture(scope="module")
def expected():
    return first_steps(toy_config())


@pytest.mark.parametrize(
    ("kind", "num_devices", "accumulate"),
    [("jit", 1, 4), ("jit", 2, 1), ("jit", 2, 2), ("pmap", 1, 1), ("pmap", 2, 1), ("pmap", 2, 4)],
)
def test_devices_and_microbatches_change_nothing(expected, kind, num_devices, accumulate):
    # The moments of the optimiser are sums of gradients: they are compared as well.
    assert_close(first_steps(toy_config(accumulate=accumulate), kind, num_devices), expected)


def test_a_step_is_that_of_the_definition(expected):
    config = toy_config(learning_rate=0.5, weight_decay=0.0, clip_norm=1e-3, warmup_steps=0)
    start = init_state(config)
    gradient = jax.grad(lambda params: config.task.loss(params, start.fixed, make_batch(config, 0), start.rng)[0])(
        start.params
    )
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
    clipped = jax.tree.map(lambda leaf: np.asarray(leaf) * 1e-3 / norm, gradient)
    state, metrics = first_steps(config, steps=1)
    # After one step of Adam, m / (1 - b1) is the gradient and v / (1 - b2) its square.
    assert_close(
        state.params, jax.tree.map(lambda p, g: p - 0.5 * g / (np.abs(g) + 1e-8), start.params, clipped), tolerance=1e-4
    )
    assert_close(state.fixed, start.fixed)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["learning_rate"], 0.5)
    assert state.step == 1


def test_each_step_and_microbatch_has_randomness_of_its_own():
    @dataclasses.dataclass(frozen=True)
    class Random(ToyTask):
        def loss(self, params, fixed, batch, rng):
            draw = jax.random.uniform(rng)
            return super().loss(params, fixed, batch, rng)[0], {"draw": draw, "square": draw * draw}

    draws = [float(first_steps(toy_config(Random()), steps=steps)[1]["draw"]) for steps in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    for kind, devices, accumulate in (("jit", 1, 2), ("pmap", 2, 1)):
        metrics = first_steps(toy_config(Random(), accumulate=accumulate), kind, devices, steps=1)[1]
        assert metrics["square"] - metrics["draw"] ** 2 > 1e-6


def test_data_follow_from_seed_and_step_alone():
    def tokens(step, **train):
        return make_batch(toy_config(**train), step)["tokens"]

    np.testing.assert_array_equal(tokens(3), tokens(3))
    assert (tokens(3) != tokens(2)).any()
    assert (tokens(3) != tokens(3, seed=1)).any()


def test_a_batch_of_another_size_is_refused():
    class Short(ToyTask):
        def batch(self, stage, position, rng):
            return {"tokens": np.zeros((3, stage.length), np.int32)}

    with pytest.raises(ValueError, match=r"batch\['tokens'\] of the task has shape \(3, 3\); .* 8 examples"):
        make_batch(toy_config(Short()), 0)


def test_batches_must_split_evenly():
    check_batch_size(8, 2, 4)
    with pytest.raises(EngineError, match=r"batch_size is 6; it must be a multiple of 4: 2 devices x 2 microbatches"):
        check_batch_size(6, 2, 2)


def test_learning_rate_warms_up_and_falls():
    rate = learning_rate(toy_config(learning_rate=1.0, warmup_steps=3, final_fraction=0.1).train)
    with jax.numpy_dtype_promotion("standard"):
        rates = [float(rate(step)) for step in range(11)]
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert sorted(rates[3:], reverse=True) == rates[3:]
    np.testing.assert_allclose(rates[10], 0.1, rtol=1e-5)


def test_a_short_run_has_a_short_warm_up():
    rate = learning_rate(toy_config(stages=STAGES[:1], learning_rate=1.0, warmup_steps=30).train)
    with jax.numpy_dtype_promotion("standard"):
        assert float(rate(2)) == 1.0


def test_learning_rate_can_fall_in_a_line():
    rate = learning_rate(toy_config(learning_rate=1.0, warmup_steps=3, decay="linear", final_fraction=0.0).train)
    total = toy_config().train.total_steps
    np.testing.assert_allclose([rate(0), rate(3), rate(total)], [0.25, 1.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(rate(3 + (total - 3) / 2), 0.5, atol=1e-6)
