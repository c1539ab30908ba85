"""The command `python -m pallas_kernels.check`: checks the GPU kernels without a GPU.

Each step finds faults that the steps before cannot: wrong numbers in the interpreter, wrong addresses in the lowered
IR, errors of the real compiler for four GPU generations, spilled registers, and the memory of a whole layer.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.check.names import STEPS, TARGET_NAMES, Step, TargetName

LAYER_TARGET: TargetName = "sm_90"
DESCRIPTION = """Checks the GPU kernels without a GPU.

The steps are:
  numerics     Compare the kernels in JAX's interpreter with the reference definitions.
  addresses    Run the lowered Triton IR in NumPy; find accesses out of bounds and double writes.
  compilation  Compile every kernel with the real compiler; count registers, spills and tensor-core instructions.
  jax-triton   Check the kernel that jax-triton launches: its numbers, and its compilation for sm_90.
  layers       Compile a whole layer for sm_90 and measure its temporary memory.

A step whose tools are not installed is skipped, and the output says how to install them. The exit status is 1 if any
check failed, and 0 otherwise."""


class Report:
    """Results of one run of the command.

    Attributes:
      failures: Description of each failure.
      skipped: Steps and measurements that were skipped, mapped to the reason.
      results: Result rows of each step.
    """

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.failures: list[str] = []
        self.skipped: dict[str, str] = {}
        self.results: dict[Step, list[dict[str, Any]]] = collections.defaultdict(list)

    def line(self, text: str) -> None:
        """Prints a progress line to standard error."""
        print(f"[{time.monotonic() - self.start:6.1f}s] {text}", file=sys.stderr, flush=True)

    def add(self, step: Step, name: str, fields: dict[str, Any], failure: str | None) -> None:
        """Records a result, and a failure if there is one, and prints a progress line."""
        self.results[step].append({**fields, "failure": failure})
        if failure is not None:
            self.failures.append(f"{step}: {name}: {failure}")
        self.line(f"{step}: {name}: {'failed: ' + failure if failure else 'ok'}")


def check_numerics(report: Report) -> None:
    """Checks the errors in JAX's interpreter: in float32 with exact dots, with emulated TF32, and in bfloat16."""
    from pallas_kernels.check import numerics

    for error in numerics.errors():
        name = f"{error.kernel} {error.arithmetic}{' causal' * error.is_causal} {error.error:.1e}"
        report.add("numerics", name, error._asdict(), error.failure)


def check_addresses(report: Report) -> None:
    """Checks bounds and double writes in the lowered IR, counts bytes, and plants two faults that must be found."""
    import jax

    from pallas_kernels.check import addresses, triton_ir

    if tuple(int(n) for n in jax.__version__.split(".")[:2]) > (0, 10):
        report.skipped["addresses"] = f"jax {jax.__version__} keeps no Triton IR in a program: pip install 'jax<0.11'"
        return
    for case in addresses.CASES:
        result = addresses.check(case)
        failure = str(result.faults[0]) if result.faults else None
        if failure is None and result.error > 1e-4:
            failure = f"the error {result.error:.1e} against XLA is above 1e-04"
        moved = {run.name: round(run.bytes_moved / run.bytes_touched, 2) for run in result.runs}
        report.add("addresses", str(case), {"case": str(case), "error": result.error, "bytes": moved}, failure)
    planted: tuple[tuple[triton_ir.FaultKind, Callable[[], list[triton_ir.Fault]]], ...] = (
        (triton_ir.OUT_OF_BOUNDS, addresses.planted_out_of_bounds),
        (triton_ir.TWO_WRITERS, addresses.planted_two_writers),
    )
    for kind, plant in planted:
        caught = any(fault.kind == kind for fault in plant())
        name = f"planted fault: {kind}"
        report.add("addresses", name, {"case": name}, None if caught else "was not found")


def check_compilation(report: Report, targets: Sequence[TargetName], whole: bool) -> None:
    """Compiles every kernel with the real compiler for each target."""
    from pallas_kernels.check import cases, compiling

    report.skipped.update(compiling.missing())
    if "compilation" in report.skipped:
        return

    def compile_for(target: TargetName) -> None:
        for compiled in compiling.compile_cases(target, list(cases.all_cases(whole))):
            name = " ".join(map(str, (*compiled.case, target)))
            numbers = f"{compiled.registers} registers" if compiled.registers is not None else ""
            fields = {**compiled.case._asdict(), **compiled._asdict()}
            del fields["case"]
            report.add("compilation", f"{name} {numbers}", fields, compiled.failure)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_for, targets))


def check_layers(report: Report) -> None:
    """Compiles a whole layer for one target and checks its memory."""
    from pallas_kernels.check import compiling, layers

    lacking = compiling.missing().get("compilation")
    if lacking is not None:
        report.skipped["layers"] = lacking
        return
    for layer in layers.compile_layers(LAYER_TARGET):
        fields = layer._asdict()
        if layer.error is None:
            fields |= {"growth": round(layer.growth, 2), "share": round(layer.share, 2)}
        report.add("layers", f"ELSAA{' causal' * layer.is_causal} {LAYER_TARGET}", fields, layer.failure)


def check_jax_triton(report: Report, whole: bool) -> None:
    """Checks the kernel that jax-triton launches: its numbers, and its compilation for one target."""
    from pallas_kernels.check import compiling, jax_triton

    lacking = jax_triton.missing()
    if lacking is not None:
        report.skipped["jax-triton"] = lacking
        return
    for result in jax_triton.interpret():
        report.add("jax-triton", f"{result.case} {result.error or 0:.1e}", result._asdict(), result.failure)
    lacking = compiling.missing().get("compilation")
    if lacking is not None:
        report.skipped["jax-triton, compiled"] = lacking
        return
    for result in jax_triton.compile_kernels(whole):
        report.add("jax-triton", f"{result.case} {result.registers} registers", result._asdict(), result.failure)


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Formats rows as text with aligned columns."""
    cells = [list(columns)]
    cells += [["" if row.get(c) is None else _text(row[c]) for c in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _text(value: Any) -> str:
    """Formats one cell of a table."""
    if isinstance(value, float):
        return f"{value:.2g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# Columns of each step's table.
COLUMNS: dict[Step, tuple[str, ...]] = {
    "numerics": ("kernel", "arithmetic", "is_causal", "error", "failure"),
    "addresses": ("case", "error", "bytes", "failure"),
    "compilation": (
        "kernel", "dtype", "head_dim", "block", "form", "target", "registers", "spilled", "shared", "tensor_cores",
        "failure",
    ),
    "jax-triton": ("case", "error", "registers", "spilled", "shared", "tensor_cores", "failure"),
    "layers": ("is_causal", "target", "kernels", "temporary", "growth", "share", "failure"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen steps and prints their results. Returns 1 if any check failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.check",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="Compile every combination of kernel, dtype, head dimension, block size and form, which takes about an "
        "hour. By default only the part that CI compiles.",
    )
    parser.add_argument("--json", action="store_true", help="Print the results as JSON. By default as tables.")
    parser.add_argument(
        "--targets",
        default=",".join(TARGET_NAMES),
        metavar="NAMES",
        help="GPU generations that the step compilation compiles for, separated by commas. Default: %(default)s.",
    )
    parser.add_argument(
        "--steps",
        default=",".join(STEPS),
        metavar="NAMES",
        help="Steps to run, separated by commas. Default: %(default)s.",
    )
    options = parser.parse_args(arguments)
    given_targets, given_steps = options.targets.split(","), options.steps.split(",")
    for flag, given, known in (("--targets", given_targets, TARGET_NAMES), ("--steps", given_steps, STEPS)):
        unknown = [x for x in given if x not in known]
        if unknown:
            parser.error(f"{flag} has {unknown[0]!r}; each name must be one of {', '.join(known)}")
    targets = [name for name in TARGET_NAMES if name in given_targets]
    steps = [name for name in STEPS if name in given_steps]
    report = Report()
    if "numerics" in steps:
        check_numerics(report)
    if "addresses" in steps:
        check_addresses(report)
    if "compilation" in steps:
        check_compilation(report, targets, options.all)
    if "jax-triton" in steps:
        check_jax_triton(report, options.all)
    if "layers" in steps:
        check_layers(report)
    if options.json:
        print(json.dumps({"results": report.results, "skipped": report.skipped, "failures": report.failures}, indent=1))
    else:
        for step, rows in report.results.items():
            print(f"\n{step}\n{table(rows, COLUMNS[step])}")
        for what, why in report.skipped.items():
            print(f"\nSkipped {what}: {why}")
        print(f"\n{len(report.failures)} failures" + "".join(f"\n  {failure}" for failure in report.failures))
        print("No kernel ran on a GPU.")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
