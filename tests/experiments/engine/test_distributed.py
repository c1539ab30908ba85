"""Two processes, joined by the network, train as one does."""

import socket

import numpy as np
import pytest

from experiments.engine.metrics import read_metrics
from experiments.engine.run import train_and_evaluate
from tests.experiments.engine.helpers import assert_close, last_state, python
from tests.experiments.engine.toy import toy_config


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("parallel", ["jit", pytest.param("pmap", marks=pytest.mark.slow)])
def test_two_processes_train_as_one(parallel, tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    config = toy_config(parallel=parallel)
    command = ["-m", "tests.experiments.engine.toy", "--workdir", together]
    command += ["--coordinator", f"localhost:{free_port()}", "--num-processes", 2, "--parallel", parallel]
    processes = [  # one device each: the same two in all as in this process
        python(*command, "--process-id", index, devices=1, wait=False) for index in range(2)
    ]
    rows = train_and_evaluate(config, alone)
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "step 10/10" in outputs[0][1]
    assert "step" not in outputs[1][1]
    assert_close(last_state(config, together), last_state(config, alone))
    one, other = (read_metrics(path / "metrics.jsonl") for path in (together, alone))
    assert [line["step"] for line in one] == [line["step"] for line in other]
    np.testing.assert_allclose([line["loss"] for line in one], [line["loss"] for line in other], rtol=1e-5)
    for row, expected in zip(train_and_evaluate(config, together), rows, strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
