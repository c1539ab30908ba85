"""The examples in the docstrings of `elsaa_jax.theory` run and print what they say."""

import doctest
import inspect

import pytest

from elsaa_jax import theory
from elsaa_jax.theory import complexity

FUNCTIONS = [
    getattr(module, name)
    for module in (theory, complexity)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_example_of_each_public_function(function):
    # Without the names of its module: a reader can copy the example.
    (test,) = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs={})
    assert test.examples, f"{function.__name__} has no example"
    report = []
    failed, _ = doctest.DocTestRunner().run(test, out=report.append)
    assert not failed, "".join(report)
