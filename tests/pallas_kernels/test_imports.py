"""The modules of `pallas_kernels` import each other in one direction, imports inside functions included."""

import ast
import graphlib
import pathlib

import pallas_kernels

ROOT = pathlib.Path(pallas_kernels.__file__).parent


def _imports(path):
    """Names of the modules of `pallas_kernels` that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pallas_kernels"):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_two_modules_import_each_other():
    files = {
        ".".join(("pallas_kernels", *path.relative_to(ROOT).with_suffix("").parts)): path for path in ROOT.rglob("*.py")
    }
    graph = {name: {other for other in _imports(path) if other in files} for name, path in files.items()}
    assert "pallas_kernels.triton_route" in graph["pallas_kernels.block_attention"]
    # Raises CycleError, with the cycle in it.
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("pallas_kernels.plan") < order.index("pallas_kernels.triton_route")
