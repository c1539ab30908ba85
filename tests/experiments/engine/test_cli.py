"""The command line: flags, files of flags, and errors of one line."""

import json
import sys

import pytest

from experiments.engine.cli import Parser, main, scale_stages
from experiments.engine.config import Stage
from experiments.engine.errors import EngineError
from tests.experiments.engine import toy
from tests.experiments.engine.helpers import assert_refused, python


def parser():
    return Parser("A test.", ["elsaa", "race", "exact"])


def test_flags():
    given = parser().parse([])
    assert given.attention == ("elsaa", "race", "exact")
    assert (given.seed, given.steps, given.batch_size, given.resume, given.eval_only) == (0, None, None, False, False)
    given = parser().parse(["--attention", "exact,race,exact", "--steps=7", "--eval-only", "--workdir=w"])
    assert (given.attention, given.steps, given.eval_only) == (("exact", "race"), 7, True)
    assert (str(given.workdir), given.parallel) == ("w", "jit")


def test_the_command_line_wins_over_a_file(tmp_path):
    path = tmp_path / "flags.json"
    path.write_text(
        json.dumps({"attention": ["race", "exact"], "steps": 5, "batch-size": 8, "resume": True, "seed": None})
    )
    given = parser().parse(["--config", str(path), "--steps", "9"])
    assert (given.attention, given.steps, given.batch_size, given.resume) == (("race", "exact"), 9, 8, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--stpes", "3"], "unrecognized arguments: --stpes 3"),
        (["--steps", "0"], "argument --steps: '0' is not an integer >= 1"),
        (["--steps", "many"], "argument --steps: 'many' is not an integer >= 1"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
        (["--attention", "elsaa,flash"], "'flash' is not known; use all, or some of elsaa,race,exact"),
        (["--parallel", "mesh"], "argument --parallel: invalid choice: 'mesh'"),
        (["--num-processes", "2"], "--coordinator, --num-processes and --process-id must be given together"),
        (
            ["--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id is 2; it must be less than --num-processes",
        ),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "no.json"], "--config no.json cannot be read (No such file or directory)"),
    ],
)
def test_a_bad_flag_is_one_line(arguments, text, capsys):
    assert_refused(parser(), arguments, text, capsys)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"stpes": 3}', "has 'stpes', which is no flag; the flags are accumulate, attention"),
        ('{"steps": 0}', "argument --steps: '0' is not an integer >= 1"),
        ('{"steps": true}', "has true for --steps; it must be a number or a string"),
        ('{"resume": "yes"}', 'has "yes" for --resume; it must be true or false'),
        ('{"config": "other.json"}', "has 'config', which is no flag"),
        ("[1]", "must hold a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_a_bad_file_of_flags_is_one_line(content, text, tmp_path, capsys):
    path = tmp_path / "flags.json"
    path.write_text(content)
    assert_refused(parser(), [f"--config={path}"], text, capsys)


def test_stages_are_scaled():
    stages = (Stage(80, 64, 32), Stage(20, 1024, 4))
    assert scale_stages(stages) == stages
    assert scale_stages(stages, steps=500, batch_size=8) == (Stage(400, 64, 64), Stage(100, 1024, 8))
    assert scale_stages(stages, steps=3, batch_size=1) == (Stage(2, 64, 8), Stage(1, 1024, 1))
    assert scale_stages(stages, steps=1) == (Stage(1, 64, 32), Stage(1, 1024, 4))
    assert scale_stages(stages[::-1], batch_size=1) == (Stage(20, 1024, 1), Stage(80, 64, 1))
    for steps in range(2, 30):
        assert sum(stage.steps for stage in scale_stages((*stages, Stage(7, 1, 1)), steps)) == max(3, steps)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (EngineError("the disk\nis full"), 2, "error: the disk is full\n"),
        (ValueError("Stage.steps is 0; it must be an integer >= 1"), 2, "error: Stage.steps is 0; it must be"),
        (FileNotFoundError(2, "No such file or directory", "data"), 2, "error: [Errno 2] No such file"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(143), 143, ""),
    ],
)
def test_errors_become_one_line(error, code, text, capsys):
    def run():
        raise error

    with pytest.raises(SystemExit) as end:
        main(run)
    written = capsys.readouterr().err
    assert end.value.code == code
    assert written.startswith(text)
    assert written.count("\n") == bool(text)


def test_other_errors_and_traceback_show_where(capsys, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        main(lambda: 1 // 0)
    monkeypatch.setattr(sys, "argv", ["toy", "--traceback"])
    with pytest.raises(SystemExit):
        main(lambda: int("x"))
    assert "Traceback" in capsys.readouterr().err


def test_a_program_refuses_in_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    process = python("-m", "tests.experiments.engine.toy", "--workdir", tmp_path)
    assert process.returncode == 2
    assert process.err == (
        f"error: {tmp_path} has metrics.jsonl but no config.json, so it is not the work dir of a run; take another "
        "--workdir\n"
    )


def test_a_program_in_this_process(tmp_path, capsys):
    toy.run(["--workdir", str(tmp_path), "--steps", "2", "--batch-size", "2", "--width", "3"])
    assert capsys.readouterr().out == "6 rows\n"
