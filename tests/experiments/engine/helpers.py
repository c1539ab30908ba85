"""What several tests of the engine share."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments.engine.checkpoints import Checkpoints
from experiments.engine.errors import EngineError
from experiments.engine.step import init_state
from experiments.engine.workdir import normal

ROOT = pathlib.Path(__file__).parents[3]


def python(*arguments, devices=2, wait=True):
    """A program of the tests in a process of its own."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=2", f"device_count={devices}")
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if wait:
        process.out, process.err = process.communicate(timeout=120)
    return process


def assert_refused(parser, flags, message, capsys):
    """Bad flags end the program with code 2 and one line, which says why."""
    with pytest.raises(SystemExit) as caught:
        parser.parse(flags)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def last_state(config, workdir):
    checkpoints = Checkpoints(workdir / "checkpoints")
    shapes = jax.eval_shape(lambda: init_state(config))
    state = checkpoints.restore_state(checkpoints.last, shapes, normal(config))
    checkpoints.close()
    return state


def assert_same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(one, other, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other)


def snapshot(path):
    """Every file below a directory, with its content; the lock is empty and of no matter."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != ".lock"
    }


def assert_refuses(call, path, *texts):
    """Checks that the call raises one sentence with these texts, and changes nothing below `path`."""
    before = snapshot(path)
    with pytest.raises(EngineError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    for text in texts:
        assert text in message, message
    assert snapshot(path) == before
    return message
