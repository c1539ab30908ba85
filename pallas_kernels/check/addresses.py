"""Runs public functions on the NumPy interpreter of Triton IR, and plants faults that it must catch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import elsaa_jax
from elsaa_jax import reference
from elsaa_jax.types import BranchOutput, Implementation
from pallas_kernels import block_attention, configs, launch, race, race_backward
from pallas_kernels.check import triton_ir
from pallas_kernels.plan import Geometry, Plan

MODULES = (block_attention, race, race_backward)
Function: TypeAlias = Literal["sort_lsh_attention", "exact_attention", "race_attention", "elsaa_attention"]
FUSED = elsaa_jax.ElsaaConfig(
    race=elsaa_jax.RaceConfig(num_tables=3, num_bits=3, chunk_size=20), sparse=elsaa_jax.SortLshConfig(9, 16)
)


class Case(NamedTuple):
    """A small call of a public function. No tile size divides its lengths.

    Attributes:
      function: Name of the function in `elsaa_jax`.
      num_queries: Number of query positions, T.
      num_keys: Number of key positions, S.
      is_causal: Whether attention is causal.
      masked: Whether there is a key mask.
      options: Other arguments of the function.
    """

    function: Function
    num_queries: int
    num_keys: int
    is_causal: bool
    masked: bool
    options: dict[str, Any]

    def __str__(self) -> str:
        parts = [self.function, f"{self.num_queries}x{self.num_keys}"]
        return " ".join(parts + ["causal"] * self.is_causal + ["masked"] * self.masked)

    def arrays(self) -> list[jax.Array]:
        """Returns a random query (2, T, 4, 16), key and value (2, S, 2, 16)."""
        rng = np.random.default_rng(self.num_queries)
        shapes = (2, self.num_queries, 4, 16), (2, self.num_keys, 2, 16), (2, self.num_keys, 2, 16)
        return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]

    def run(self, implementation: Implementation, *arrays: jax.Array) -> BranchOutput:
        """Calls the function of `elsaa_jax`. `elsaa_attention` returns no mass, so its mass is 0."""
        return self._call(elsaa_jax, *arrays, implementation=implementation)

    def run_reference(self, *arrays: jax.Array) -> BranchOutput:
        """Calls the function of `elsaa_jax.reference`."""
        return self._call(reference, *arrays)

    def _call(self, module: Any, *arrays: jax.Array, **extra_options: Any) -> BranchOutput:
        planes = elsaa_jax.sample_planes(jax.random.key(0), (3, 3, 16)) / 2
        mask = jnp.asarray(np.random.default_rng(1).random((2, self.num_keys)) < 0.8) if self.masked else None
        extra = {"race_attention": (planes,), "sort_lsh_attention": (planes[0],)}.get(self.function, ())
        options = {**self.options, "is_causal": self.is_causal, "key_mask": mask, **extra_options}
        if self.function == "elsaa_attention":
            out = module.elsaa_attention(*arrays, race_planes=planes, **options)
            return BranchOutput(out, jnp.zeros(out.shape[:3], jnp.float32))
        return getattr(module, self.function)(*arrays, *extra, **options)


CASES = [
    Case("sort_lsh_attention", 37, 37, False, False, {"block_size": 20}),
    Case("sort_lsh_attention", 21, 50, False, True, {"block_size": 16, "pairing": "bucket", "num_neighbors": 1}),
    Case("sort_lsh_attention", 41, 53, True, True, {"block_size": 8, "min_length": 12}),
    Case("exact_attention", 19, 67, True, False, {}),
    Case("race_attention", 35, 39, False, True, {}),
    Case("race_attention", 35, 51, True, False, {"chunk_size": 20}),
    Case("elsaa_attention", 35, 39, False, True, {"config": FUSED}),
    Case("elsaa_attention", 35, 51, True, False, {"config": FUSED}),
]


@contextlib.contextmanager
def on_triton_ir() -> Iterator[list[triton_ir.Run]]:
    """Runs kernels of the implementation "interpret" in this context on their Triton IR, and yields their records."""
    runs: list[triton_ir.Run] = []

    def call(
        kernel: functools.partial[None],
        name: configs.CompiledName,
        settings: configs.Settings,
        grid: tuple[int, ...],
        out_shapes: Sequence[jax.ShapeDtypeStruct],
        arrays: Sequence[jax.Array],
        *,
        aliases: dict[int, int] | None = None,
    ) -> list[jax.Array]:
        settings = settings._replace(arithmetic="gpu")
        # The kernel holds the settings too, for the arithmetic of its dots.
        kernel = functools.partial(kernel.func, *kernel.args, **{**kernel.keywords, "settings": settings})

        def launch_it(*arrays: jax.Array) -> list[jax.Array]:
            return launch.call(kernel, name, settings, grid, out_shapes, arrays, aliases=aliases)

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        (found,) = triton_ir.kernels_of(triton_ir.lower(launch_it, *shapes))

        def run(*arrays: jax.Array) -> list[np.ndarray]:
            runs.append(triton_ir.run(found, [np.asarray(x) for x in arrays]))
            return runs[-1].outputs

        return jax.pure_callback(run, list(out_shapes), *arrays)

    # Programs traced outside the context must not be reused inside it, nor the other way round.
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "call", call))
        yield runs
    jax.clear_caches()


class Result(NamedTuple):
    """Result of a case.

    Attributes:
      error: Largest error of outputs and gradients against XLA.
      runs: Records of the kernels that ran.
    """

    error: float
    runs: list[triton_ir.Run]

    @property
    def faults(self) -> list[triton_ir.Fault]:
        """Faults of all kernels."""
        return [fault for run in self.runs for fault in run.faults]


def check(case: Case) -> Result:
    """Runs forward and backward of a case on the Triton IR and compares them with XLA."""

    def value_and_grads(implementation: Implementation) -> Any:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            branch = case.run(implementation, *arrays)
            mass = jnp.where(jnp.isneginf(branch.log_mass), 0.0, branch.log_mass)
            return jnp.sum(jnp.sin(branch.out)) + jnp.sum(jnp.cos(mass)), (branch.out, mass)

        derive = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        return jax.block_until_ready(derive(*case.arrays()))

    expected = value_and_grads("xla")
    with on_triton_ir() as runs:
        found = value_and_grads("interpret")
    errors = jax.tree.map(lambda x, y: float(jnp.max(jnp.abs(x - y))), found, expected)
    return Result(max(jax.tree.leaves(errors)), runs)


def planted_out_of_bounds() -> list[triton_ir.Fault]:
    """Removes the masks of loads and stores from block attention, and returns the faults found."""

    def without_mask(ref: launch.Ref, rows: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        index, present = places(ref, rows)
        return index, jnp.ones_like(present)

    places: Callable = launch._places
    with mock.patch.object(launch, "_places", without_mask):
        return check(CASES[0]).faults


def planted_two_writers() -> list[triton_ir.Fault]:
    """Runs block attention with a plan in which two tiles hold the same queries, and returns the faults found."""
    rows = jnp.arange(16, dtype=jnp.int32)
    two, both = jnp.stack([rows, rows]), jnp.array([0, 1], jnp.int32)
    plan = Plan(two, jnp.stack([rows, rows + 16]), both, both + 1, both, both + 1)
    query, key = jnp.ones((16, 16), jnp.float32), jnp.ones((32, 16), jnp.float32)
    settings = configs.Settings(16, 16, 4, 1)
    geometry = Geometry(1.0, None)
    with on_triton_ir() as runs:
        jax.block_until_ready(block_attention.forward(plan, query, key, key, None, jnp.float32, geometry, settings))
    return runs[0].faults
