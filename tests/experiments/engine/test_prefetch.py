"""Batches are made ahead of their steps, and training tells how long it waited for them."""

import json
import threading

import pytest

from experiments.engine import stopwatch
from experiments.engine.prefetch import Prefetch
from experiments.engine.stopwatch import Stopwatch
from tests.experiments.engine.toy import toy_config


def test_the_next_one_is_made_meanwhile():
    made, ahead = [], threading.Event()

    def make(step):
        made.append((step, threading.current_thread()))
        if step == 4:
            ahead.set()
        return step * step

    with Prefetch(make, 5, ahead=1) as batches:
        assert batches.get(3) == 9
        assert ahead.wait(30)
        assert batches.get(4) == 16
    assert [step for step, _ in made] == [3, 4]
    assert threading.main_thread() not in {thread for _, thread in made}


def test_several_are_made_at_a_time():
    together = threading.Barrier(3)

    def make(step):
        if step:
            together.wait(30)
        return step

    with Prefetch(make, 4, ahead=3) as batches:
        assert [batches.get(step) for step in range(4)] == [0, 1, 2, 3]


def test_an_error_comes_with_its_step():
    def make(step):
        if step == 1:
            raise ValueError("no more data")
        return step

    with Prefetch(make, 2) as batches:
        assert batches.get(0) == 0
        with pytest.raises(ValueError, match="no more data"):
            batches.get(1)


def test_time_goes_on_where_it_was_saved(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now[0])
    path = tmp_path / "time.json"

    def train(step):
        clock = Stopwatch(path, step)
        now[0] += 5
        with clock.waiting():
            now[0] += 2
        clock.save()
        now[0] += 50  # lost, as after a kill
        return stopwatch.read_times(path)

    assert train(0) == (7.0, 2.0)
    assert train(10) == (14.0, 4.0)
    assert train(0) == (7.0, 2.0)
    stored = json.loads(path.read_text())
    assert (stored["seconds"], stored["waited"]) == (7.0, 2.0)


def test_positions_count_the_examples_of_all_stages():
    train = toy_config().train  # 4 steps of 8 examples, then 6 of 4
    assert [train.examples_before(step) for step in (0, 1, 4, 5, 10)] == [0, 8, 32, 36, 56]
