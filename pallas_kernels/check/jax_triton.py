"""The route by jax-triton: numbers on Triton's interpreter, and the real compiler for one target, without a device.

In processes of their own, since Triton chooses its interpreter, and jax-triton where it writes, when they are imported:
`python -m pallas_kernels.check.jax_triton interpret` and `... compile DIRECTORY` write results as JSON lines.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels.check import compiling
from pallas_kernels.check.cases import BLOCK_FORMS, KernelCase, build

TARGET = "sm_90"
PACKAGES = "jax-triton==0.3.1 triton"


class Result(NamedTuple):
    """One case: the error of its numbers, or what the compiler made of it."""

    case: str
    failure: str | None
    error: float | None = None
    registers: int | None = None
    spilled: int | None = None
    shared: int | None = None
    tensor_cores: int | None = None


def missing() -> str | None:
    """What is not here, and how to get it; None: nothing."""
    for module in ("triton", "jax_triton"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is missing: pip install --no-deps {PACKAGES}"
    return None


def interpret() -> Iterator[Result]:
    """Block attention on Triton's interpreter against `elsaa_jax.reference`: masks, odd lengths, levels, stretches."""
    yield from _results({"TRITON_INTERPRET": "1"}, "interpret")


def compile_kernels(whole: bool) -> Iterator[Result]:
    """Lowers and compiles the kernel for `TARGET`, at head dimension 64 or, if `whole`, at all of the matrix."""
    with tempfile.TemporaryDirectory() as dump:
        environment = {"TRITON_INTERPRET": "0", "JAX_TRITON_DUMP_DIR": dump}
        ptxas = compiling.find_tool("ptxas")
        if ptxas is not None:
            # Else Triton writes PTX for its own ptxas, which may be newer than that of the machine.
            environment |= {"TRITON_PTXAS_PATH": ptxas, "TRITON_PTXAS_BLACKWELL_PATH": ptxas}
        yield from _results(environment, "compile", dump, *["whole"] * whole)


def _results(environment: dict[str, str], *arguments: str) -> Iterator[Result]:
    command = [sys.executable, "-m", "pallas_kernels.check.jax_triton", *arguments]
    everything = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    with subprocess.Popen(
        command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Result(**json.loads(line))
    if process.returncode:
        yield Result(arguments[0], f"the process died with status {process.returncode}")


def _interpret() -> Iterator[Result]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.check.addresses import CASES
    from pallas_kernels.check.numerics import TOLERANCES
    from pallas_kernels.configs import use_jax_triton

    for case in CASES:
        if case.function not in ("sort_lsh_attention", "exact_attention"):
            continue
        for dtype in ("float32", "bfloat16"):
            arrays = [x.astype(dtype) for x in case.arrays()]
            with use_jax_triton():
                found = jax.jit(lambda *arrays, case=case: case.run("interpret", *arrays))(*arrays)
            expected = case.run_reference(*(x.astype(jnp.float32) for x in arrays))
            # Where there are no keys, both masses are -inf.
            pairs = [(np.exp(np.asarray(x[1])), np.asarray(x[0], np.float32)) for x in (found, expected)]
            error = max(float(np.abs(x - y).max() / max(1.0, np.abs(y).max())) for x, y in zip(*pairs, strict=True))
            failure = None if error <= TOLERANCES[dtype] else f"error {error:.1e} above {TOLERANCES[dtype]:.0e}"
            yield Result(f"{case} {dtype}", failure, error)


def _compile(dump: pathlib.Path, whole: bool) -> Iterator[Result]:
    import jax

    from pallas_kernels.check.targets import TARGETS
    from pallas_kernels.configs import use_target

    target = TARGETS[TARGET]
    sharding = target.sharding()
    capability = target.capability[0] * 10 + target.capability[1]
    for dtype in ("bfloat16", "float32"):
        for head_dim in (32, 64, 128) if whole else (64,):
            for form in BLOCK_FORMS:
                case = KernelCase("block_forward", dtype, head_dim, 128, form)
                before = set(dump.iterdir())
                function, arguments = build(case, capability, sharding, "jax-triton")
                with use_target(capability):
                    lowered = jax.jit(function).lower(*arguments)
                lowered.compile()
                (place,) = set(dump.iterdir()) - before
                yield _measure(case, lowered.as_text(), target.architecture, place)


def _measure(case: KernelCase, program: str, architecture: str, place: pathlib.Path) -> Result:
    (info,) = place.glob("*.compile_info")
    (shared,) = re.findall(r"shared_mem_bytes: (\d+)", info.read_text())
    fields = compiling.measure(architecture, place) | {"shared": int(shared)}
    failure = compiling.Compiled(case, TARGET, **fields).failure
    if "triton_kernel_call" not in program:
        failure = "the kernel is not in the program"
    return Result(" ".join(map(str, (*case, TARGET))), failure, None, **fields)


def main(step: str, *arguments: str) -> None:
    """Runs one step."""
    results = _interpret() if step == "interpret" else _compile(pathlib.Path(arguments[0]), len(arguments) > 1)
    for result in results:
        print(json.dumps(result._asdict()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
