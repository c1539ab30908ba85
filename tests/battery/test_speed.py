"""Speed against exact attention, ours and PyTorch's, in one run (`pytest -m slow -s tests/battery/test_speed.py`)."""

import statistics
import time

import jax
import jax.numpy as jnp
import pytest

import elsaa_jax
from tests.compilation import optimized

pytestmark = pytest.mark.slow
LENGTH = 32_768
REPEATS = 5


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compiled(function, arrays):
    program = optimized(function).lower(*arrays).compile()
    return lambda: jax.block_until_ready(program(*arrays))


def torch_runs(arrays):
    torch = pytest.importorskip("torch", reason="the bench extra is not installed")
    attend = torch.nn.functional.scaled_dot_product_attention
    tensors = [torch.from_dlpack(x).transpose(1, 2).contiguous() for x in arrays]
    tracked = [x.clone().requires_grad_() for x in tensors]
    return lambda: attend(*tensors), lambda: attend(*tracked).sum().backward()


def test_elsaa_is_faster_than_exact_attention():
    arrays = [jax.random.normal(jax.random.key(i), (1, LENGTH, 4, 64)) for i in range(3)]
    planes = elsaa_jax.sample_planes(jax.random.key(3), (4, 4, 64))

    def elsaa(*arrays):
        return elsaa_jax.elsaa_attention(*arrays, race_planes=planes)

    def exact(*arrays):
        return elsaa_jax.exact_attention(*arrays).out

    def backward(function):
        return jax.grad(lambda *a: jnp.sum(function(*a)), argnums=(0, 1, 2))

    torch_forward, torch_backward = torch_runs(arrays)
    runs = {
        "forward": {"elsaa": compiled(elsaa, arrays), "exact": compiled(exact, arrays), "torch": torch_forward},
        "forward + backward": {
            "elsaa": compiled(backward(elsaa), arrays),
            "exact": compiled(backward(exact), arrays),
            "torch": torch_backward,
        },
    }
    ratios = {}
    for name, methods in runs.items():
        methods["elsaa"]()
        # One slow method between two fast ones, so that all see the same noise.
        times = {method: [] for method in methods}
        for method in ("exact", "torch"):
            times[method].append(seconds(methods[method]))
            times["elsaa"] += [seconds(methods["elsaa"]) for _ in range(REPEATS)]
        median = {method: statistics.median(values) for method, values in times.items()}
        spread = f"{min(times['elsaa']):.2f} to {max(times['elsaa']):.2f}"
        print(f"\n{name}: elsaa {median['elsaa']:.2f} s ({spread})", end="")
        for method in ("exact", "torch"):
            ratios[name, method] = median[method] / median["elsaa"]
            print(f", {method} {median[method]:.1f} s ({ratios[name, method]:.0f} times)", end="")
    for method in ("exact", "torch"):
        assert ratios["forward", method] >= 20, ratios
        assert ratios["forward + backward", method] >= 15, ratios
