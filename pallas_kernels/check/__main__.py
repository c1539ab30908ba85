"""`python -m pallas_kernels.check`: what can be proved of the kernels without a GPU, as one command.

Each step catches what the one before cannot: numbers in the interpreter, addresses in the lowered IR,
compilation by the real compiler for four GPU generations, registers and spills, memory of a whole layer.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")
LAYER_TARGET = "sm_90"


class Report:
    """Progress lines, tables and failures of one run."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.failures: list[str] = []
        self.skipped: dict[str, str] = {}
        self.results: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)

    def line(self, text: str) -> None:
        """A progress line."""
        print(f"[{time.monotonic() - self.start:6.1f}s] {text}", file=sys.stderr, flush=True)

    def add(self, step: str, name: str, fields: dict[str, Any], failure: str | None) -> None:
        """A result and, if it is not good enough, a failure."""
        self.results[step].append({**fields, "failure": failure})
        if failure is not None:
            self.failures.append(f"{step}: {name}: {failure}")
        self.line(f"{step}: {name}: {failure or 'ok'}")


def check_numerics(report: Report) -> None:
    """Errors in JAX's interpreter, with exact float32 dots, with TF32 emulated, and in bfloat16."""
    from pallas_kernels.check import numerics

    for error in numerics.errors():
        name = f"{error.kernel} {error.arithmetic}{' causal' * error.is_causal} {error.error:.1e}"
        report.add("numerics", name, error._asdict(), error.failure)


def check_addresses(report: Report) -> None:
    """Bounds, writers and bytes in the lowered IR, and two planted faults."""
    import jax

    from pallas_kernels.check import addresses, triton_ir

    if tuple(int(n) for n in jax.__version__.split(".")[:2]) > (0, 10):
        report.skipped["addresses"] = f"jax {jax.__version__} keeps no Triton IR in the program: pip install 'jax<0.11'"
        return
    for case in addresses.CASES:
        result = addresses.check(case)
        failure = str(result.faults[0]) if result.faults else None
        if failure is None and result.error > 1e-4:
            failure = f"error {result.error:.1e} against XLA"
        moved = {run.name: round(run.bytes_moved / run.bytes_touched, 2) for run in result.runs}
        report.add("addresses", str(case), {"case": str(case), "error": result.error, "bytes": moved}, failure)
    planted = (
        (triton_ir.OUT_OF_BOUNDS, addresses.planted_out_of_bounds),
        (triton_ir.TWO_WRITERS, addresses.planted_two_writers),
    )
    for kind, plant in planted:
        caught = any(fault.kind == kind for fault in plant())
        report.add("addresses", f"planted: {kind}", {"case": f"planted: {kind}"}, None if caught else "was not caught")


def check_compilation(report: Report, targets: Sequence[str], whole: bool) -> None:
    """Every kernel by the real compiler, for each target."""
    from pallas_kernels.check import cases, compiling

    report.skipped.update(compiling.missing())
    if "compilation" in report.skipped:
        return

    def compile_for(target: str) -> None:
        for compiled in compiling.compile_cases(target, list(cases.all_cases(whole))):
            name = " ".join(map(str, (*compiled.case, target)))
            numbers = f"{compiled.registers} registers" if compiled.registers is not None else ""
            fields = {**compiled.case._asdict(), **compiled._asdict()}
            del fields["case"]
            report.add("compilation", f"{name} {numbers}", fields, compiled.failure)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_for, targets))


def check_layers(report: Report) -> None:
    """Memory of a whole layer, compiled for one target."""
    from pallas_kernels.check import layers

    if "compilation" in report.skipped:
        report.skipped["layers"] = report.skipped["compilation"]
        return
    for layer in layers.compile_layers(LAYER_TARGET):
        fields = layer._asdict()
        if layer.error is None:
            fields |= {"growth": round(layer.growth, 2), "share": round(layer.share, 2)}
        report.add("layers", f"ELSAA{' causal' * layer.is_causal} {LAYER_TARGET}", fields, layer.failure)


def check_jax_triton(report: Report, whole: bool) -> None:
    """The Triton kernel behind block attention: its numbers, and its compilation for one target."""
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
    """Rows as text, in columns that are as wide as they must be."""
    cells = [list(columns)]
    cells += [["" if row.get(c) is None else _text(row[c]) for c in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


COLUMNS = {
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
    """Runs the steps; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="the whole matrix, not the part that CI compiles")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    parser.add_argument("--targets", default=",".join(TARGETS), help="GPUs to compile for (default: %(default)s)")
    parser.add_argument("--steps", default=",".join(COLUMNS), help="steps to run (default: %(default)s)")
    options = parser.parse_args(arguments)
    targets, steps = options.targets.split(","), options.steps.split(",")
    for name, given, known in (("--targets", targets, TARGETS), ("--steps", steps, tuple(COLUMNS))):
        unknown = [x for x in given if x not in known]
        if unknown:
            parser.error(f"{name} has {unknown[0]!r}; it must be of {', '.join(known)}")
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
            print(f"\nskipped: {what}: {why}")
        print(f"\n{len(report.failures)} failures" + "".join(f"\n  {failure}" for failure in report.failures))
        print("Nothing ran on a GPU.")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
