"""Every experiment is a command with a readable --help, and the package lists all of them."""

import argparse
import importlib
import pathlib
import re
import runpy
import sys

import pytest

import experiments

ROOT = pathlib.Path(experiments.__file__).parent
COMMANDS = sorted(
    {path.stem for path in ROOT.glob("*.py") if path.stem != "__init__"}
    | {path.parent.name for path in ROOT.glob("*/__main__.py")}
)


def parser_of(name):
    is_folder = (ROOT / name).is_dir()
    return importlib.import_module(f"experiments.{name}{'.command' if is_folder else ''}").make_parser()


def test_the_package_lists_every_command():
    listed = re.findall(r"python -m experiments\.(\w+) +[A-Z].*\.$", experiments.__doc__, re.MULTILINE)
    assert sorted(listed) == COMMANDS
    assert len(COMMANDS) == 9


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed(name, monkeypatch, capsys):
    """As `python -m experiments.NAME --help`, without the cost of a new process."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"experiments.{name}", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m experiments.{name} [-h]")
    for action in parser_of(name)._actions:
        assert action.option_strings[0] in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_help_texts_are_sentences_with_defaults(name):
    parser = parser_of(name)
    assert parser.description.endswith((".", "?"))
    formatter = parser._get_formatter()
    for action in parser._actions:
        text = formatter._expand_help(action)
        assert re.match(r"[A-Z]", text), (action.dest, text)
        assert text.endswith("."), (action.dest, text)
        if not isinstance(action, argparse._HelpAction):
            assert text.count("Default: ") == 1, (action.dest, text)
