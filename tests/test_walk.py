"""One training step is read in the order of few files, and the architecture page lists them."""

import pathlib
import re
import sys

import pytest

from tests.walk import switches, visits, walk

PAGE = pathlib.Path(__file__).parents[1] / "docs/guides/architecture.md"


@pytest.fixture(scope="module")
def calls():
    return walk()


def test_the_step_switches_files_seldom(calls):
    """It was 135 before the library was arranged in folders; from Python 3.12 on, comprehensions are not calls."""
    assert switches(calls) <= 67


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the page lists the walk of Python 3.11")
def test_the_page_lists_the_walk(calls):
    listed = re.findall(r"^\d+\. `([a-z_/]+\.py)`: (.*)$", PAGE.read_text(), flags=re.M)
    expected = [(file, ", ".join(f"`{name}`" for name in names)) for file, names in visits(calls)]
    assert listed == expected, "run `python -m tests.walk` and copy its list into the page"
