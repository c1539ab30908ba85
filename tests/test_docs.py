"""The documentation points to what is there: files, functions, names, commands, links."""

import ast
import functools
import importlib
import importlib.util
import json
import pathlib
import re
from typing import NamedTuple

import pytest

import elsaa_jax
import pallas_kernels
from experiments.paper.report import HEAD, format_tables

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The packages are imported from the tree, or from an installed wheel.
HOMES = {
    **dict.fromkeys(("docs", "examples", "experiments", "tests", ".ci"), ROOT),
    "elsaa_jax": pathlib.Path(elsaa_jax.__file__).parents[1],
    "pallas_kernels": pathlib.Path(pallas_kernels.__file__).parents[1],
}
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def sources(*packages):
    return [
        path
        for package in packages
        for path in sorted((HOMES[package] / package).rglob("*.py"))
        if "__pycache__" not in path.parts
    ]


DOCUMENTED = sources("elsaa_jax", "pallas_kernels", "experiments", "examples")
SOURCES = [*DOCUMENTED, *sources("tests")]


def name_of(path):
    return next(str(path.relative_to(home)) for home in HOMES.values() if path.is_relative_to(home))


class Text(NamedTuple):
    """Text that a person reads, and the line it begins at."""

    line: int
    text: str


def docstrings(path):
    """All docstrings of a file."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield Text(node.body[0].lineno, text)


def texts(path):
    return [Text(1, path.read_text())] if path.suffix == ".md" else list(docstrings(path))


@functools.cache
def parse(path):
    return ast.parse(path.read_text())


@functools.cache
def identifiers(path):
    """Every name that a file defines: functions, classes, variables, arguments, attributes and keywords."""
    names = set()
    for node in ast.walk(parse(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.keyword(arg=str(name)):
                names.add(name)
    return names


@functools.cache
def definitions(path):
    """The functions and classes of a file, and the variables and fields of its modules and classes."""
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Module | ast.ClassDef):
            for child in node.body:
                for target in getattr(child, "targets", [getattr(child, "target", None)]):
                    names.update(part.id for part in ast.walk(target or ast.Pass()) if isinstance(part, ast.Name))
    return names


def defines(path, name):
    return set(name.split(".")) <= definitions(path)


def find_files(pointer, origin):
    """The files that a path or a bare file name may mean."""
    first = pointer.split("/")[0]
    if "/" not in pointer:
        return [path for path in SOURCES if path.name == pointer]
    candidates = [HOMES[first] / pointer] if first in HOMES else [origin.parent / pointer]
    candidates += [HOMES[package] / package / pointer for package in ("elsaa_jax", "pallas_kernels", "experiments")]
    return [path for path in candidates if path.exists()]


# A file with code, or a path that begins with one of our folders: `race.py`, `tests/cases.py`, `docs/results/`.
FOLDERS = "|".join(map(re.escape, HOMES))
PATH = re.compile(rf"(?<![\w./`-])(`?)((?:[\w.-]+/)*[\w-]+\.py|(?:{FOLDERS})/[\w./-]*)(?::([\w.]+))?\1")
# `_state` and `_readout` in `race.py`; `log_binomials` of `rank_bounds`
INSIDE = re.compile(r"((?:`[\w.]+`(?:, | and ))*`[\w.]+`) (?:in|of)\s+`([\w/]+?)(\.py)?`")
DOTTED = re.compile(r"(?<![\w./])((?:elsaa_jax|pallas_kernels|experiments)(?:\.\w+)+)")
COMMAND = re.compile(r"python -m ([\w.]+)((?:[^`\n|#]|\\\n)*)")
PUBLIC = re.compile(rf"`({'|'.join(elsaa_jax.__all__)})\.(?!py\b)(\w+)")
# `masses.dot_rows`
MEMBER = re.compile(r"`([a-z]\w*)\.(?!(?:py|md|json|jsonl|png)\b)(\w+)")
FLAX = {"linen", "nnx"}


@functools.cache
def modules(name):
    """The files of the library that a module's short name may mean."""
    return [path for path in sources("elsaa_jax", "pallas_kernels") if path.stem == name and name not in FLAX]


def problems_with_paths(path, text):
    for match in PATH.finditer(text):
        pointer, name = match[2].rstrip("."), match[3]
        found = find_files(pointer, path)
        if not found:
            yield match, f"{pointer} does not exist"
        elif name and not any(defines(file, name.rstrip(".")) for file in found):
            yield match, f"{pointer} defines no {name}"


def problems_with_places(path, text):
    """`name` in `file.py`, `name` of `module`, and `module.name`."""
    for match in INSIDE.finditer(text):
        names, place, is_file = re.findall(r"`([\w.]+?)(?<!\.py)`", match[1]), match[2], match[3]
        files = find_files(f"{place}.py", path) if is_file else modules(place)
        for name in names if files else ():
            if not any(defines(file, name) for file in files):
                yield match, f"{place} has no {name}"
    for match in MEMBER.finditer(text):
        files = modules(match[1])
        if files and not any(defines(file, match[2]) for file in files):
            yield match, f"{match[1]} has no {match[2]}"


def problems_with_names(path, text):
    del path
    for match in DOTTED.finditer(text):
        if not match[1].endswith((".py", ".md", ".json")) and not resolves(match[1]):
            yield match, f"{match[1]} does not exist"
    for match in PUBLIC.finditer(text):
        # A module may share the name of a public function: `soft_codes.CODE_SCALE`.
        if not has(getattr(elsaa_jax, match[1]), match[2]) and not any(
            defines(file, match[2]) for file in modules(match[1])
        ):
            yield match, f"{match[1]} has no {match[2]}"


@functools.cache
def resolves(dotted):
    """Whether a name is a module, or what a module has."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.util.find_spec(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        if found is None:
            continue
        owner = importlib.import_module(".".join(parts[:end]))
        for part in parts[end:]:
            if not has(owner, part):
                return False
            owner = getattr(owner, part, None)
        return True
    return False


def has(owner, name):
    return hasattr(owner, name) or name in getattr(owner, "__annotations__", {})


def problems_with_commands(path, text):
    del path
    flags = command_flags()
    for match in COMMAND.finditer(text):
        module, rest = match[1], match[2]
        if module.split(".")[0] not in HOMES or module.endswith("."):  # `experiments.<name>` is none.
            continue
        if not can_run(module):
            yield match, f"python -m {module} does not exist"
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
            if flag not in flags:
                yield match, f"{module} has no flag {flag}"


@functools.cache
def command_flags():
    """Every flag of a command line of ours."""
    return {
        node.value
        for path in DOCUMENTED
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch("--[a-z-]+", node.value)
    } | {"--help"}


@functools.cache
def can_run(module):
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        return False
    return spec is not None


@functools.cache
def words_of_code():
    """Every name in our source and of its files, and every word of its one-line strings, which name fields of files."""
    words = {path.stem for path in SOURCES}
    for path in SOURCES:
        if path == pathlib.Path(__file__).resolve():
            continue
        for node in ast.walk(parse(path)):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                    words.update(name.split("."))
                case ast.Constant(value=str(value)) if "\n" not in value:
                    words.update(re.findall(r"\w+", value))
        words |= identifiers(path)
    return words


CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.M | re.S)
PAPER_AND_FLAX = {"d_h", "L_s", "batch_stats"}


def problems_with_identifiers(path, text):
    """`snake_case` and `CamelCase` in backticks are names of our code, or of the code blocks of the same page."""
    known = words_of_code() | PAPER_AND_FLAX
    if path.suffix == ".md":
        known = known.union(*(re.findall(r"\w+", block) for block in CODE_BLOCK.findall(text)))
    for match in re.finditer(r"`([A-Za-z_]\w*)(?:\([^`]*\))?`", text):
        if re.search("_|[a-z][A-Z]", match[1]) and match[1] not in known:
            yield match, f"{match[1]} is no name of the code"


CHECKS = [
    problems_with_paths,
    problems_with_places,
    problems_with_names,
    problems_with_commands,
    problems_with_identifiers,
]


@pytest.mark.parametrize("path", [*PAGES, *DOCUMENTED], ids=name_of)
def test_pointers_resolve(path):
    found = [
        f"line {line + text.count(chr(10), 0, match.start())}: {problem}"
        for line, text in texts(path)
        for check in CHECKS
        for match, problem in check(path, text)
    ]
    assert not found, "\n".join([f"{name_of(path)} points to what does not exist:", *found])


def headings(path):
    """Anchors of a page, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", path.read_text()), re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_resolve(path):
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists():
            problems.append(f"{target}: no such file")
        elif anchor and anchor not in headings(linked):
            problems.append(f"{target}: no such heading")
    assert not problems, f"{name_of(path)}: {problems}"


def imports_of(path):
    """The modules of the library that a file imports, as `elsaa_jax.blocks.call`."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (inner if node.module == "elsaa_jax" else [node.module])
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_follow_the_architecture():
    """The order is that of the page: each name imports itself and what stands on its left."""
    page = (ROOT / "docs" / "guides" / "architecture.md").read_text()
    order = re.split(" <- |, ", re.search(r"^types <- .* <- experiments$", page, re.M)[0])
    allowed = {name: {"types", *order[: i + 1]} for i, name in enumerate(order)}
    allowed["dispatch"] = allowed["config"]
    with_kernels = {"dispatch", *order[order.index("blocks") :]}
    wrong = []
    for path in sources("elsaa_jax"):
        relative = path.relative_to(HOMES["elsaa_jax"] / "elsaa_jax")
        own = relative.parts[0].removesuffix(".py")
        if own not in allowed:  # The package, the short names of the layers, and the leaves: reference and theory.
            continue
        for module in imports_of(path):
            package, _, rest = module.partition(".")
            is_wrong = package == "pallas_kernels" and own not in with_kernels
            if package == "elsaa_jax":
                names = allowed[own] | ({"dispatch"} if own in with_kernels else set())
                is_wrong = rest.split(".")[0] not in names
            if is_wrong:
                wrong.append(f"{relative} imports {module}")
    assert not wrong, wrong


def test_the_page_of_the_tables_is_what_the_report_writes():
    """`python -m experiments.paper` writes the page again; text that is edited there alone would be lost."""
    results = ROOT / "docs" / "results"
    stored = json.loads((results / "paper.json").read_text())
    text = f"{HEAD}\n\n{format_tables(stored['rows'], stored['niah'])}\n\n!["
    assert (results / "paper.md").read_text().startswith(text)
