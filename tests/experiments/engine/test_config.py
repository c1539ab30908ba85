"""Configs check themselves, and two are the same where their JSON is."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import pytest

from elsaa_jax import ElsaaConfig
from experiments.engine.config import RunConfig, Stage, TrainConfig, as_json
from tests.experiments.engine.toy import STAGES, ToyTask, toy_config


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("stages", (), "one Stage or more"),
        ("stages", [STAGES[0]], "must be a tuple"),
        ("stages", (STAGES[0], 3), "must be a Stage"),
        ("learning_rate", 0.0, "finite number > 0"),
        ("decay", "step", "one of"),
        ("learning_rate", float("nan"), "finite number > 0"),
        ("warmup_steps", -1, "integer >= 0"),
        ("final_fraction", 1.5, ">= 0.0 and <= 1"),
        ("b1", 1.0, ">= 0.0 and <= 0.99"),
        ("b2", -0.1, ">= 0.0 and <= 0.99"),
        ("weight_decay", "0.1", "finite number >= 0"),
        ("clip_norm", 0, "finite number > 0"),
        ("accumulate", 0, "integer >= 1"),
        ("seed", -1, "integer from 0 to 4294967295"),
        ("seed", True, "integer from 0"),
        ("parallel", "mesh", "one of 'jit', 'pmap'"),
        ("checkpoint_every", -1, "integer >= 0"),
        ("validate_every", 2.5, "integer >= 0"),
        ("log_every", 0, "integer >= 1"),
        ("evaluate_on", "first", "one of 'last', 'best'"),
    ],
)
def test_a_bad_value_is_named(field, value, allowed):
    with pytest.raises(ValueError, match=field) as error:
        TrainConfig(**{"stages": STAGES, field: value})
    assert allowed in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["steps", "length", "batch_size"])
def test_a_bad_stage_is_named(field):
    with pytest.raises(ValueError, match=rf"Stage\.{field} is 0; it must be an integer >= 1"):
        dataclasses.replace(STAGES[0], **{field: 0})


def test_stages_follow_each_other():
    config = TrainConfig(STAGES)
    assert config.total_steps == 10
    assert [config.stage_at(step) for step in range(10)] == [STAGES[0]] * 4 + [STAGES[1]] * 6
    with pytest.raises(ValueError, match="step is 10; it must be an integer from 0 to 9"):
        config.stage_at(10)


def test_a_run_has_a_dataclass_for_a_task():
    with pytest.raises(ValueError, match=r"RunConfig.task is 'niah'; it must be an instance of a frozen dataclass"):
        RunConfig("niah", TrainConfig(STAGES))
    with pytest.raises(ValueError, match=r"RunConfig.train is None"):
        RunConfig(ToyTask(), None)


def test_json_has_all_fields_and_the_names_of_classes():
    values = toy_config(ToyTask(width=4)).to_json()
    assert values == json.loads(json.dumps(values))
    assert values["task"] == {"class": "ToyTask", "width": 4, "noise": 0.0}
    assert values["train"]["stages"][1] == {"class": "Stage", "steps": 6, "length": 5, "batch_size": 4}
    assert values["train"].keys() == {"class"} | {field.name for field in dataclasses.fields(TrainConfig)}


def test_json_of_other_values():
    assert as_json(ElsaaConfig(), "x")["race"]["num_bits"] == 4
    assert as_json({"path": pathlib.Path("a/b"), "dtype": jnp.float32, "none": None}, "x") == {
        "path": "a/b",
        "dtype": "float32",
        "none": None,
    }
    with pytest.raises(ValueError, match=r"task\.rates\[0\] is .*; it must be a number"):
        as_json({"rates": [object()]}, "task")


def test_a_stage_may_have_fields_of_its_own():
    @dataclasses.dataclass(frozen=True)
    class NeedleStage(Stage):
        needles: int = 1

    stages = (NeedleStage(1, 2, 3, needles=4),)
    assert toy_config(stages=stages).to_json()["train"]["stages"][0]["needles"] == 4
