"""Check of the Triton kernel that jax-triton launches: its numbers, and its compilation for one target.

`python -m pallas_kernels.check.jax_triton interpret` runs the kernel on Triton's interpreter, and
`python -m pallas_kernels.check.jax_triton compile DIRECTORY` compiles it. Both print one JSON line per result. The
check runs them in separate processes, because Triton chooses its interpreter, and jax-triton its output directory, when
they are imported.
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
from typing import Literal, NamedTuple, TypeAlias, get_args

from pallas_kernels.check import compiling
from pallas_kernels.check.cases import BLOCK_FORMS, KernelCase, build
from pallas_kernels.check.names import TargetName

TritonStep: TypeAlias = Literal["interpret", "compile"]
TARGET: TargetName = "sm_90"
PACKAGES = "jax-triton==0.3.1 triton"


class Result(NamedTuple):
    """Result of one case: the error of its numbers, or the measurements of the compiled kernel.

    Attributes:
      case: Description of the case.
      failure: Reason why the case does not pass, or None.
      error: Largest error against the reference.
      registers: Registers per thread.
      spilled: Bytes of registers that spill to memory.
      shared: Bytes of shared memory of a program.
      tensor_cores: Number of tensor-core instructions.
    """

    case: str
    failure: str | None
    error: float | None = None
    registers: int | None = None
    spilled: int | None = None
    shared: int | None = None
    tensor_cores: int | None = None


def missing() -> str | None:
    """Returns which package is missing and the command that installs it, or None if all are here."""
    for module in ("triton", "jax_triton"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is missing: pip install --no-deps {PACKAGES}"
    return None


def interpret() -> Iterator[Result]:
    """Compares the kernel on Triton's interpreter with `elsaa_jax.reference`: masks, odd lengths, levels, stretches."""
    yield from _results({"TRITON_INTERPRET": "1"}, "interpret")


def compile_kernels(whole: bool) -> Iterator[Result]:
    """Compiles the kernel for `TARGET`: at head dimension 64 or, if `whole`, at 32, 64 and 128."""
    with tempfile.TemporaryDirectory() as dump:
        environment = {"TRITON_INTERPRET": "0", "JAX_TRITON_DUMP_DIR": dump}
        ptxas = compiling.find_tool("ptxas")
        if ptxas is not None:
            # Without these, Triton writes PTX for its own ptxas, which can be newer than the one installed here.
            environment |= {"TRITON_PTXAS_PATH": ptxas, "TRITON_PTXAS_BLACKWELL_PATH": ptxas}
        yield from _results(environment, "compile", dump, *["whole"] * whole)


def _results(environment: dict[str, str], step: TritonStep, *arguments: str) -> Iterator[Result]:
    """Runs this module in a separate process and yields its results."""
    command = [sys.executable, "-m", "pallas_kernels.check.jax_triton", step, *arguments]
    everything = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    with subprocess.Popen(
        command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Result(**json.loads(line))
    if process.returncode:
        yield Result(step, f"the process exited with status {process.returncode}")


def _interpret() -> Iterator[Result]:
    """Compares the kernel with the reference, in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.check.addresses import CASES
    from pallas_kernels.check.numerics import TOLERANCES
    from pallas_kernels.configs import DTYPES, use_jax_triton

    for case in CASES:
        if case.function not in ("sort_lsh_attention", "exact_attention"):
            continue
        for dtype in DTYPES:
            arrays = [x.astype(dtype) for x in case.arrays()]
            with use_jax_triton():
                found = jax.jit(lambda *arrays, case=case: case.run("interpret", *arrays))(*arrays)
            expected = case.run_reference(*(x.astype(jnp.float32) for x in arrays))
            # A query without keys has the mass -inf in both, which cannot be subtracted, so exp(mass) is compared.
            pairs = [(np.exp(np.asarray(x[1])), np.asarray(x[0], np.float32)) for x in (found, expected)]
            error = max(float(np.abs(x - y).max() / max(1.0, np.abs(y).max())) for x, y in zip(*pairs, strict=True))
            failure = (
                None
                if error <= TOLERANCES[dtype]
                else f"error {error:.1e} is above the tolerance {TOLERANCES[dtype]:.0e}"
            )
            yield Result(f"{case} {dtype}", failure, error)


def _compile(dump: pathlib.Path, whole: bool) -> Iterator[Result]:
    """Compiles the kernel in this process. jax-triton writes its files to the directory `dump`."""
    import jax

    from pallas_kernels.check.targets import TARGETS
    from pallas_kernels.configs import DTYPES, use_target

    target = TARGETS[TARGET]
    sharding = target.sharding()
    capability = target.capability[0] * 10 + target.capability[1]
    for dtype in DTYPES:
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
    """Measures the compiled kernel whose files are in the directory `place`."""
    (info,) = place.glob("*.compile_info")
    (shared,) = re.findall(r"shared_mem_bytes: (\d+)", info.read_text())
    fields = compiling.measure(architecture, place) | {"shared": int(shared)}
    failure = compiling.Compiled(case, TARGET, **fields).failure
    if "triton_kernel_call" not in program:
        failure = "the compiled program does not call the kernel"
    return Result(" ".join(map(str, (*case, TARGET))), failure, None, **fields)


def main(step: TritonStep, *arguments: str) -> None:
    """Runs one step and prints the results."""
    results = _interpret() if step == "interpret" else _compile(pathlib.Path(arguments[0]), len(arguments) > 1)
    for result in results:
        print(json.dumps(result._asdict()), flush=True)


if __name__ == "__main__":
    (chosen,) = (name for name in get_args(TritonStep) if name == sys.argv[1])
    main(chosen, *sys.argv[2:])
