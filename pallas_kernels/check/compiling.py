"""Compilation of kernels by the real GPU compiler, without a device: registers, spills, shared memory, tensor cores.

`python -m pallas_kernels.check.compiling sm_90 DIRECTORY` reads cases as JSON lines from standard input, compiles them
for sm_90 and prints one JSON line per case. The check runs one such process per target, because a bad kernel can abort
the process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from pallas_kernels.check.cases import KernelCase
from pallas_kernels.check.names import TARGET_NAMES, TargetName

if TYPE_CHECKING:
    from pallas_kernels.check.targets import Target

Tool: TypeAlias = Literal["ptxas", "nvdisasm"]
# Instructions that run on tensor cores, in the machine code of any generation.
TENSOR_CORES = re.compile(r"\b(HMMA|HGMMA|UTC[A-Z]*MMA|QMMA|OMMA)\b")
# Since JAX 0.11, lowering a program compiles its kernels and keeps neither Triton IR nor PTX.
KEEPS_PTX = tuple(int(n) for n in importlib.metadata.version("jax").split(".")[:2]) < (0, 11)


class Compiled(NamedTuple):
    """Results of compiling one kernel. A number is None if the tool that measures it is missing.

    Attributes:
      case: Kernel call that was compiled.
      target: GPU generation.
      error: Reason why the compilation failed, or None.
      registers: Registers per thread.
      spilled: Bytes of registers that spill to memory.
      shared: Bytes of shared memory of a program.
      tensor_cores: Number of tensor-core instructions.
    """

    case: KernelCase
    target: TargetName
    error: str | None = None
    registers: int | None = None
    spilled: int | None = None
    shared: int | None = None
    tensor_cores: int | None = None

    @property
    def failure(self) -> str | None:
        """Reason why the kernel does not pass, or None."""
        if self.error is not None:
            return self.error
        if self.spilled:
            return f"spills {self.spilled} bytes of registers"
        return "uses no tensor cores" if self.tensor_cores == 0 else None


def find_tool(name: Tool) -> str | None:
    """Returns the path of a CUDA tool, on PATH or in NVIDIA's Python packages; None if it is missing."""
    found = shutil.which(name)
    if found is not None:
        return found
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    for place in places or ():
        for path in pathlib.Path(place).glob(f"*/bin/{name}"):
            return str(path)
    return None


def missing() -> dict[str, str]:
    """Returns the measurements that cannot be made here. Each is mapped to the reasons, with the commands that help."""
    jax = importlib.metadata.version("jax")
    lacking: dict[str, str] = {}
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        packages = f"jax-cuda13-plugin=={jax} jax-cuda13-pjrt=={jax}"
        lacking["compilation"] = f"the CUDA plugin is missing: pip install --no-deps {packages}"
    # ptxas and nvdisasm both need the PTX of a kernel, so a JAX that keeps none is a reason for either.
    reasons = [] if KEEPS_PTX else [f"jax {jax} keeps no PTX of a kernel: pip install 'jax<0.11'"]
    if find_tool("ptxas") is None:
        reasons.append("ptxas is missing: install the CUDA toolkit 13, or pip install nvidia-cuda-nvcc")
    if reasons:
        lacking["registers and spills"] = "; ".join(reasons)
    if find_tool("nvdisasm") is None:
        reasons.append("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    if reasons:
        lacking["tensor cores"] = "; ".join(reasons)
    return lacking


def compile_cases(target: TargetName, cases: list[KernelCase]) -> Iterator[Compiled]:
    """Compiles cases in a separate process. If a case kills the process, it is an error and a new process continues."""
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory() as dump:
            flags = f"--xla_dump_to={dump} --xla_dump_disable_metadata"
            environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            command = [sys.executable, "-m", "pallas_kernels.check.compiling", target, dump]
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("".join(json.dumps(case) + "\n" for case in left))
            process.stdin.close()
            for line in process.stdout:
                fields = json.loads(line)
                yield Compiled(left.pop(0), target, **fields)
            if process.wait() and left:
                yield Compiled(
                    left.pop(0), target, error=f"the compiler process exited with status {process.returncode}"
                )


def _compile(
    case: KernelCase, target: Target, dump: pathlib.Path, sharding: Any, cache: dict[str, dict]
) -> dict[str, Any]:
    """Compiles one case and measures it. `cache` holds the results of equal programs."""
    import jax

    from pallas_kernels.check.cases import build

    major, minor = target.capability
    function, arguments = build(case, major * 10 + minor, sharding)
    try:
        with target.lowering():
            lowered = jax.jit(function).lower(*arguments)
        text = lowered.as_text()
        if text not in cache:
            for path in dump.iterdir():
                path.unlink()
            lowered.compile()
            cache[text] = measure(target.architecture, dump)
        return cache[text]
    except Exception as error:
        return {"error": str(error).splitlines()[0][:200]}


def measure(architecture: str, dump: pathlib.Path) -> dict[str, Any]:
    """Measures the one kernel whose PTX is in the directory `dump`: registers, spills, shared memory, tensor cores."""
    found = [path for path in dump.glob("*.ptx") if ".entry" in path.read_text()]
    if not found and not KEEPS_PTX:
        return {}
    (ptx,) = found
    threads = "".join(path.read_text() for path in dump.glob("*thunk_sequence.txt"))
    shared = re.findall(r"shared_?mem\w*[=:]\s*(\d+)", threads) or re.findall(r"shmem_bytes[=:]\s*(\d+)", threads)
    results: dict[str, Any] = {"shared": int(shared[0]) if shared else None}
    ptxas, nvdisasm = find_tool("ptxas"), find_tool("nvdisasm")
    if ptxas is None:
        return results
    cubin = dump / "kernel.cubin"
    command = [ptxas, "-v", f"-arch={architecture}", str(ptx), "-o", str(cubin)]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    results["registers"] = int(re.findall(r"Used (\d+) registers", log)[0])
    results["spilled"] = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    if nvdisasm is not None:
        code = subprocess.run([nvdisasm, str(cubin)], capture_output=True, text=True, check=True).stdout
        results["tensor_cores"] = len(TENSOR_CORES.findall(code))
    return results


def main(target_name: TargetName, dump: str) -> None:
    """Compiles the cases from standard input for one target and prints the results."""
    from pallas_kernels.check.targets import TARGETS

    target = TARGETS[target_name]
    sharding = target.sharding()
    cache: dict[str, dict] = {}
    for line in sys.stdin:
        result = _compile(KernelCase(*json.loads(line)), target, pathlib.Path(dump), sharding, cache)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    (chosen,) = (name for name in TARGET_NAMES if name == sys.argv[1])
    main(chosen, sys.argv[2])
