"""Forward and backward of a whole `ELSAA` layer: the kernels in the lowered program, and the memory it needs.

`python -m pallas_kernels.check.layers sm_90` compiles the layer for sm_90 and prints one JSON line per result. The
check runs it in a separate process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from pallas_kernels.check.names import TARGET_NAMES, TargetName

LENGTHS = (4_096, 65_536)
FEATURES, HEADS = 256, 4


class Layer(NamedTuple):
    """Results of compiling a layer.

    Attributes:
      is_causal: Whether attention is causal.
      target: GPU generation.
      kernels: Number of calls of each kernel in the lowered program.
      temporary: Bytes of temporary memory at each of `LENGTHS`.
      error: Reason why the compilation failed, or None.
    """

    is_causal: bool
    target: TargetName
    kernels: dict[str, int]
    temporary: tuple[int, ...]
    error: str | None = None

    @property
    def growth(self) -> float:
        """Ratio of the memory at the longer length to that at the shorter."""
        return self.temporary[1] / self.temporary[0]

    @property
    def share(self) -> float:
        """Ratio of the memory at the longer length to that of q, k, v, out and their gradients."""
        return self.temporary[1] / (8 * LENGTHS[1] * FEATURES * 4)

    @property
    def failure(self) -> str | None:
        """Reason why the layer needs too much memory or did not compile, or None."""
        if self.error is not None:
            return self.error
        growth, share = (20.0, 4.0) if self.is_causal else (16.5, 2.5)
        if self.growth > growth:
            return f"memory grows by a factor of {self.growth:.1f}, above the limit of {growth}"
        if self.share > share:
            return f"memory is {self.share:.2f} times q, k, v, out and gradients, above the limit of {share}"
        return None


def derivative(is_causal: bool, length: int, sharding: Any = None) -> tuple[Any, tuple[Any, ...]]:
    """Returns the gradient function of a layer that uses the kernels, and the shapes of its arguments.

    The function can be lowered for a GPU.
    """
    import jax
    import jax.numpy as jnp

    from elsaa_jax import ELSAA, ElsaaConfig, SortLshConfig

    config = (
        ElsaaConfig(sparse=SortLshConfig(num_bits=12, block_size=64, min_length=256)) if is_causal else ElsaaConfig()
    )
    layer = ELSAA(num_heads=HEADS, is_causal=is_causal, config=config, implementation="pallas")
    x = jax.ShapeDtypeStruct((1, length, FEATURES), jnp.float32, sharding=sharding)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding), variables)

    def loss(params: Any, hashes: Any, x: Any) -> Any:
        out: Any = layer.apply({"params": params, "hashes": hashes}, x)
        return jnp.sum(jnp.sin(out))

    return jax.grad(loss, argnums=(0, 2)), (variables["params"], variables["hashes"], x)


def count_kernels(text: str) -> dict[str, int]:
    """Counts the calls of each kernel in the text of a program that was lowered for a GPU."""
    names = re.findall(r'@__gpu\$xla\.gpu\.triton.*? name = "(\w+)"', text)
    return {name: names.count(name) for name in sorted(set(names))}


def compile_layers(target: TargetName) -> Iterator[Layer]:
    """Compiles the non-causal and the causal layer at both lengths, in a separate process."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "pallas_kernels.check.layers", target]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    done = 0
    for line in process.stdout:
        yield Layer(**json.loads(line))
        done += 1
    if process.wait():
        yield Layer(bool(done), target, {}, (), f"the compiler process exited with status {process.returncode}")


def main(target_name: TargetName) -> None:
    """Compiles the layers for one target and prints the results."""
    import jax

    from pallas_kernels.check.targets import TARGETS
    from pallas_kernels.configs import use_target

    target = TARGETS[target_name]
    sharding = target.sharding()
    major, minor = target.capability
    for is_causal in (False, True):
        temporary, kernels = [], {}
        with use_target(major * 10 + minor):
            for length in LENGTHS:
                function, arguments = derivative(is_causal, length, sharding)
                with target.lowering():
                    lowered = jax.jit(function).lower(*arguments)
                kernels = count_kernels(lowered.as_text())
                analysis: Any = lowered.compile().memory_analysis()
                temporary.append(analysis.temp_size_in_bytes)
        print(json.dumps(Layer(is_causal, target_name, kernels, tuple(temporary))._asdict()), flush=True)


if __name__ == "__main__":
    (chosen,) = (name for name in TARGET_NAMES if name == sys.argv[1])
    main(chosen)
