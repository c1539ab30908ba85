"""Tables, intervals and progress."""

import io

import pytest

from experiments.engine.bar import Bar
from experiments.engine.progress import Progress, format_seconds
from experiments.engine.stats import wilson_interval
from experiments.engine.table import format_table
from tests.experiments.engine.toy import toy_config


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        # R: prop.test(x, n, correct = FALSE), to four places.
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval(correct, n, low, high):
    assert wilson_interval(correct, n) == pytest.approx((low, high), abs=6e-5)


def test_wilson_interval_narrows_and_refuses():
    assert wilson_interval(50, 100, z=1.0)[0] > wilson_interval(50, 100)[0]
    for correct, n in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="n must be at least 1 and correct from 0 to n"):
            wilson_interval(correct, n)


def test_a_table_is_aligned():
    table = format_table(["attention", "1,024", "n"], [["elsaa", 0.95, "8"], ["exact", "1.00 [0.9, 1.0]", 1024]])
    assert table.splitlines() == [
        "| attention | 1,024           |    n |",
        "| --------- | --------------- | ---: |",
        "| elsaa     | 0.95            |    8 |",
        "| exact     | 1.00 [0.9, 1.0] | 1024 |",
    ]
    assert format_table(["a"], []).splitlines() == ["| a   |", "| --- |"]
    with pytest.raises(ValueError, match="a row has 1 cells; it must have 2"):
        format_table(["a", "b"], [["c"]])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, seconds=1.0, first=60.0, enabled=True, log_every=2):
    """What is shown of ten steps, of which the first of a stage takes `first` seconds and the others `seconds`."""
    now = [0.0]
    progress = Progress(toy_config(log_every=log_every).train, stream=stream, clock=lambda: now[0], enabled=enabled)
    for done in range(1, 11):
        now[0] += first if done in (1, 5) else seconds
        progress.update(done, lambda: 1.5)
    progress.note("done")
    progress.close()
    return stream.getvalue()


def test_lines_without_a_terminal():
    lines = shown(io.StringIO(), seconds=0.5, first=1.0).splitlines()
    # A batch has 24 tokens, then 20. After step 4 there are 6 x 20 of them left.
    assert lines[:3] == [
        "step 2/10, length 3, loss 1.5000, 2 steps/s, 48 tokens/s, 4 s left",
        "step 4/10, length 3, loss 1.5000, 2 steps/s, 48 tokens/s, 2 s left",
        "step 6/10, length 5, loss 1.5000, 2 steps/s, 40 tokens/s, 2 s left",
    ]
    assert [line.split(",")[0] for line in lines[3:]] == ["step 8/10", "step 10/10", "done"]


def test_slow_steps_have_a_line_each():
    lines = shown(io.StringIO(), seconds=7.0, log_every=100).splitlines()
    assert [line.split(",")[0] for line in lines[:-1]] == [f"step {done}/10" for done in range(1, 11)]
    assert lines[0] == "step 1/10, length 3, loss 1.5000"  # Nothing is known of the rate but that of compilation.
    assert "0.143 steps/s" in lines[1]


def test_a_bar_on_a_terminal():
    text = shown(Terminal())
    bars = text.split("\r")[1:]
    assert len(bars) == 10
    assert bars[4].startswith("[############............] step 5/10, length 5, loss 1.5000")
    assert bars[-1].startswith("[########################] step 10/10")
    assert bars[-1].endswith("\ndone\n")
    assert text.count("\n") == 2


def test_a_note_leaves_the_bar():
    stream = Terminal()
    bar = Bar(4, stream)
    bar.show(1, "a long text")
    bar.show(2, "short")
    bar.note("a note")
    bar.close()
    first, second = f"[{'#' * 6}{'.' * 18}] a long text", f"[{'#' * 12}{'.' * 12}] short"
    assert stream.getvalue() == f"\r{first}\r{second.ljust(len(first))}\na note\n"


def test_other_processes_are_silent():
    assert shown(io.StringIO(), enabled=False) == shown(Terminal(), enabled=False) == ""


def test_seconds():
    assert [format_seconds(seconds) for seconds in (0.4, 59, 185, 7800)] == ["0 s", "59 s", "3 min 05 s", "2 h 10 min"]
