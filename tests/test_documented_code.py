"""Documented code runs: blocks of the README and of the docs, examples in docstrings, and the scripts in examples/."""

import contextlib
import doctest
import inspect
import io
import re
import runpy
import textwrap
import tomllib
from typing import NamedTuple

import jax
import pytest

import elsaa_jax
import elsaa_jax.nnx
from tests.test_docs import PAGES, ROOT, name_of

NOT_RUN = "# Not run by the tests: "


class Block(NamedTuple):
    """A Python code block of a page."""

    line: int
    code: str


def python_blocks(path):
    text = path.read_text()
    for match in re.finditer(r"^( *)```python[^\n]*\n(.*?)^\1```$", text, re.M | re.S):
        yield Block(text.count("\n", 0, match.start()) + 1, textwrap.dedent(match[2]))


WITH_CODE = [path for path in PAGES if any(True for _ in python_blocks(path))]


@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    """In order, in one namespace, as a reader runs them; top-level prints give what their comments say."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for line, code in python_blocks(path):
        if code.startswith(NOT_RUN):
            continue
        # Lines of errors are those of the page.
        program = compile("\n" * line + code, str(path), "exec")
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            exec(program, namespace)
        expected = re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
        if expected:
            assert printed.getvalue().splitlines() == expected, f"{name_of(path)}, line {line}"


def test_blocks_that_are_not_run_give_a_reason():
    for path in WITH_CODE:
        for line, code in python_blocks(path):
            first = code.splitlines()[0]
            assert not first.lower().startswith("# not run") or len(first) > len(NOT_RUN) + 10, (path, line)


def test_the_quick_start_is_marked():
    """`.ci/run` takes it by its mark."""
    assert len(re.findall(r"^```python quickstart$", (ROOT / "README.md").read_text(), re.M)) == 1


def test_the_citation_has_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_api_reference_has_every_public_name():
    text = "".join(path.read_text() for path in PAGES if path.parent.name == "api")
    assert [name for name in elsaa_jax.__all__ if not re.search(rf"\b{name}\b", text)] == []


WITH_DOCSTRING = [name for name in elsaa_jax.__all__ if callable(getattr(elsaa_jax, name))]


@pytest.mark.parametrize("name", [*WITH_DOCSTRING, "nnx.ELSAA"])
def test_public_docstrings_have_an_example_that_runs(name):
    owner = elsaa_jax.nnx.ELSAA if name == "nnx.ELSAA" else getattr(elsaa_jax, name)
    text = inspect.cleandoc(owner.__doc__)
    assert re.search(r"^Examples?:$", text, re.M), f"{name} has no section Example:"
    test = doctest.DocTestParser().get_doctest(text, {}, name, inspect.getsourcefile(owner), 0)
    assert test.examples, f"{name} has an example without >>>"
    report = io.StringIO()
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write)
    assert results.failed == 0, report.getvalue()


@pytest.mark.parametrize("name", ["linen_language_model.py", "nnx_language_model.py"])
def test_examples_learn(name, capsys):
    path = ROOT / "examples" / name
    assert len(path.read_text().splitlines()) < 120
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        losses = runpy.run_path(str(path))["train"](steps=8, length=128, batch_size=2)
    assert losses[-1] < losses[0] - 0.5
    assert "validation loss" in capsys.readouterr().out
