"""The packages import each other in one direction, imports inside functions included."""

import ast
import graphlib
import importlib.util
import pathlib

PACKAGES = ("elsaa_jax", "pallas_kernels", "experiments")

# A room may import itself and the rooms below it. `reference` and `theory` stand aside: no fast code imports them.
LEVELS = (
    ("types",),
    ("checks",),
    ("config",),
    ("arrays", "hashing", "dispatch"),
    ("blocks",),
    ("sparse", "low_rank"),
    ("fusion", "attention"),
    ("layers",),
    ("linen", "nnx"),
)
LEVEL = {f"elsaa_jax.{room}": level for level, rooms in enumerate(LEVELS) for room in rooms}
LEAVES = ("elsaa_jax.reference", "elsaa_jax.theory")
# Rooms above the checks whose imports are fewer than their level allows.
ALLOWED = {
    "elsaa_jax.dispatch": {"elsaa_jax.types", "elsaa_jax.checks", "pallas_kernels"},
    "elsaa_jax.reference": {"elsaa_jax.types", "elsaa_jax.checks", "elsaa_jax.config"},
}
# Rooms that may use the kernels.
USE_KERNELS = {f"elsaa_jax.{room}" for room in ("dispatch", "blocks", "sparse", "low_rank", "attention")}


def module_files(package):
    """Returns the file of each module of a package; a package's own name is that of its `__init__`."""
    files = {}
    spec = importlib.util.find_spec(package)  # The installed package, or the source tree.
    folder = pathlib.Path(spec.origin).parent
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = {name: path for package in PACKAGES for name, path in module_files(package).items()}


def imports_of(path):
    """Returns the modules of this project that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import in line {node.lineno}; use the full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            # `from package import module` needs the module, not what else the package holds.
            found.update(name if name in FILES else node.module for name in names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name in FILES}


IMPORTS = {name: imports_of(path) for name, path in FILES.items()}


def room_of(module):
    """Returns the folder or file of `elsaa_jax` that holds a module; of another package, its name."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "elsaa_jax" else parts[0]


def room_imports():
    """Yields each import between two rooms, as (module, its room, imported module, its room)."""
    for module, imported in IMPORTS.items():
        for other in imported:
            if room_of(module) != room_of(other):
                yield module, room_of(module), other, room_of(other)


def test_every_room_has_a_level():
    rooms = {room_of(name) for name in module_files("elsaa_jax")} - {"elsaa_jax", *LEAVES}
    assert rooms == set(LEVEL)
    # The imports are found, those inside functions too.
    assert "elsaa_jax.blocks.one_block" in IMPORTS["elsaa_jax.blocks.tiles"]
    assert "pallas_kernels.triton_route" in IMPORTS["pallas_kernels.block_attention"]


def test_rooms_import_only_lower_rooms():
    wrong = []
    for module, room, other, other_room in room_imports():
        if room in LEVEL and other_room != "pallas_kernels":
            lower = other_room in LEVEL and LEVEL[other_room] < LEVEL[room]
            beside = {room, other_room} <= {"elsaa_jax.fusion", "elsaa_jax.attention"}
            if not (lower or beside):
                wrong.append((module, other))
        if room in ALLOWED and other_room not in ALLOWED[room]:
            wrong.append((module, other))
    assert not wrong


def test_only_some_rooms_use_the_kernels():
    users = {room for _, room, _, other_room in room_imports() if other_room == "pallas_kernels"}
    assert users - {"experiments"} <= USE_KERNELS


def test_fast_code_imports_no_leaf():
    allowed = {"elsaa_jax", "elsaa_jax.theory", "experiments", "pallas_kernels"}
    assert {room for _, room, _, other in room_imports() if other in LEAVES} <= allowed


def test_the_library_imports_no_experiment():
    for module, room, other, other_room in room_imports():
        assert other_room != "experiments", (module, other)
        if room == "pallas_kernels":
            assert module.startswith("pallas_kernels.check."), (module, other)


def test_no_two_modules_import_each_other():
    # The tools of `pallas_kernels.check` use the whole library.
    graph = {name: others for name, others in IMPORTS.items() if not name.startswith("pallas_kernels.check")}
    # Raises CycleError, with the cycle in it.
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("elsaa_jax.types") < order.index("elsaa_jax.layers.linen")
