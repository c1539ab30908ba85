"""Compilation by the real GPU compiler, without a device: registers, spills, shared memory, tensor cores.

Run as a process of its own for each target, since a bad kernel can abort it:
`python -m pallas_kernels.check.compiling sm_90` reads cases as JSON lines and writes results as JSON lines.
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
from typing import Any, NamedTuple

from pallas_kernels.check.cases import KernelCase

TENSOR_CORES = re.compile(r"\b(HMMA|HGMMA|UTC[A-Z]*MMA|QMMA|OMMA)\b")


# From JAX 0.11 on a kernel is compiled when it is lowered, and nothing of it is left to look at.
KEEPS_PTX = tuple(int(n) for n in importlib.metadata.version("jax").split(".")[:2]) < (0, 11)


class Compiled(NamedTuple):
    """What the compiler made of one kernel; None where a tool is missing, `error` where it failed."""

    case: KernelCase
    target: str
    error: str | None = None
    registers: int | None = None
    spilled: int | None = None
    shared: int | None = None
    tensor_cores: int | None = None

    @property
    def failure(self) -> str | None:
        """Why it is not good enough, in a word or two."""
        if self.error is not None:
            return self.error
        if self.spilled:
            return f"{self.spilled} bytes spilled"
        return "no tensor cores" if self.tensor_cores == 0 else None


def find_tool(name: str) -> str | None:
    """ptxas or nvdisasm, on the path or among NVIDIA's Python packages."""
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
    """What is not here, and how to get it."""
    jax = importlib.metadata.version("jax")
    lacking = {}
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        packages = f"jax-cuda13-plugin=={jax} jax-cuda13-pjrt=={jax}"
        lacking["compilation"] = f"the CUDA plugin is missing: pip install --no-deps {packages}"
    if find_tool("ptxas") is None:
        lacking["registers and spills"] = (
            "ptxas is missing: install the CUDA toolkit 13, or pip install nvidia-cuda-nvcc"
        )
    if not KEEPS_PTX:
        lacking["registers and spills"] = f"jax {jax} leaves no PTX of a kernel: pip install 'jax<0.11'"
    if find_tool("nvdisasm") is None:
        lacking["tensor cores"] = "nvdisasm is missing: pip install nvidia-cuda-nvdisasm"
    return lacking


def compile_cases(target: str, cases: list[KernelCase]) -> Iterator[Compiled]:
    """Compiles cases in another process; one that kills it is an error, and the rest goes on in a new one."""
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
                yield Compiled(left.pop(0), target, error=f"the compiler died with status {process.returncode}")


def _compile(
    case: KernelCase, target: Any, dump: pathlib.Path, sharding: Any, cache: dict[str, dict]
) -> dict[str, Any]:
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
    """Registers, spills and tensor-core instructions of the one kernel in the dump."""
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


def main(target_name: str, dump: str) -> None:
    """Compiles the cases of standard input for one target."""
    from pallas_kernels.check.targets import TARGETS

    target = TARGETS[target_name]
    sharding = target.sharding()
    cache: dict[str, dict] = {}
    for line in sys.stdin:
        result = _compile(KernelCase(*json.loads(line)), target, pathlib.Path(dump), sharding, cache)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
