"""A task that compiles in no time: the next token of a counter, by an embedding and one dense layer.

`python -m tests.experiments.engine.toy --workdir DIR` trains it, for tests of what outlives a process.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.engine.cli import Parser, main, scale_stages
from experiments.engine.config import RunConfig, Stage, TrainConfig
from experiments.engine.run import train_and_evaluate

VOCABULARY = 7
STAGES = (Stage(steps=4, length=3, batch_size=8), Stage(steps=6, length=5, batch_size=4))


@dataclasses.dataclass(frozen=True)
class ToyTask:
    """Predicts token + 1.

    Attributes:
      width: of the embedding.
      noise: of the embedding in training, from the randomness of the step.
    """

    width: int = 8
    noise: float = 0.0

    def init(self, rng: jax.Array) -> dict[str, Any]:
        draws = jax.random.normal(rng, (2 * VOCABULARY + 1, self.width))  # One draw compiles faster than three.
        params = {
            "embed": draws[:VOCABULARY],
            "out": {"kernel": 0.1 * draws[VOCABULARY:-1].T, "bias": jnp.zeros(VOCABULARY)},
        }
        return {"params": params, "hashes": {"planes": draws[-1]}}

    def batch(self, stage: Stage, position: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"tokens": rng.integers(VOCABULARY, size=(stage.batch_size, stage.length))}

    def loss(self, params, fixed, batch, rng):
        tokens = batch["tokens"]
        x = params["embed"][tokens] * fixed["hashes"]["planes"][None, None, :]
        if self.noise:
            x = x + self.noise * jax.random.normal(rng, x.shape)
        logits = x @ params["out"]["kernel"] + params["out"]["bias"][None, None, :]
        answers = jax.nn.one_hot((tokens + 1) % VOCABULARY, VOCABULARY)
        loss = -jnp.mean(jnp.sum(answers * jax.nn.log_softmax(logits), axis=-1))
        return loss, {"accuracy": jnp.mean(jnp.argmax(logits, -1) == jnp.argmax(answers, -1), dtype=jnp.float32)}

    def validate(self, variables: dict[str, Any]) -> dict[str, float]:
        return {"score": -float(np.abs(variables["params"]["out"]["bias"]).sum())}

    def evaluations(self) -> list[dict[str, Any]]:
        return [{"token": token} for token in range(3)]

    def evaluate(self, variables: dict[str, Any], spec: dict[str, Any]) -> list[dict[str, Any]]:
        embedding = np.asarray(variables["params"]["embed"])[spec["token"]]
        return [{**spec, "sum": embedding.sum()}, {**spec, "largest": embedding.max()}]


def toy_config(task: Any = None, **train: Any) -> RunConfig:
    values = {"stages": STAGES, "warmup_steps": 2, "checkpoint_every": 3, "validate_every": 4, "log_every": 2}
    return RunConfig(task or ToyTask(), TrainConfig(**{**values, **train}))


def run(arguments: list[str] | None = None) -> None:
    parser = Parser("Trains the toy.", ["elsaa", "exact"])
    parser.add_argument("--width", type=int, default=8)
    given = parser.parse(arguments)
    if given.workdir is None:
        parser.error("--workdir is missing")
    config = toy_config(
        ToyTask(given.width),
        stages=scale_stages(STAGES, given.steps, given.batch_size),
        seed=given.seed,
        parallel=given.parallel,
        accumulate=given.accumulate,
    )
    rows = train_and_evaluate(config, given.workdir, resume=given.resume, eval_only=given.eval_only)
    print(len(rows), "rows")


if __name__ == "__main__":
    main(run)
