"""A disk that fills up while checkpoints are written ends a run with one sentence, and with nothing else on stderr."""

import sys
import types

import pytest

from experiments.engine.checkpoints import without_closed_loops
from tests.experiments.engine.helpers import python

# No file may grow beyond 4,000 bytes, so the checkpoint of a wide model cannot be written.
PROGRAM = """
import os, resource
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # Its files would not fit either.
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
from tests.experiments.engine.toy import main, run
main(run)
"""


def test_a_checkpoint_that_does_not_fit(tmp_path):
    process = python("-c", PROGRAM, "--workdir", tmp_path, "--width", 2000)
    assert process.returncode == 2
    lines = [line for line in process.err.splitlines() if not line.startswith("step ")]
    assert lines == [
        f"error: no checkpoint can be written to {tmp_path}/checkpoints (File too large); no checkpoint was saved "
        "before: make room or give access and run the same command again"
    ]


@pytest.mark.parametrize(
    ("error", "is_shown"),
    [
        (RuntimeError("Event loop is closed"), False),
        (RuntimeError("Event loop is running"), True),
        (ValueError("Event loop is closed"), True),
    ],
)
def test_only_closed_event_loops_are_left_out(error, is_shown):
    """Tensorstore still reports writes to the event loop that Orbax closed when the first write failed."""
    shown = []
    hook = without_closed_loops(shown.append)
    report = types.SimpleNamespace(exc_type=type(error), exc_value=error, object=None)
    hook(report)
    assert shown == [report] * is_shown
    in_an_object = types.SimpleNamespace(exc_type=type(error), exc_value=error, object=sys)
    hook(in_an_object)
    assert shown[-1] == in_an_object
