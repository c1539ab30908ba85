"""The steps after which a run validates, logs and saves."""

from __future__ import annotations

from typing import NamedTuple

from experiments.engine.config import TrainConfig


class Due(NamedTuple):
    """Actions that follow a step. The last step is validated, and a validated step is also logged and saved."""

    validate: bool
    log: bool
    save: bool

    @classmethod
    def after(cls, done: int, config: TrainConfig) -> Due:
        """Returns the actions that follow when `done` steps are done."""

        def is_time(every: int) -> bool:
            return bool(every) and done % every == 0

        validate = done == config.total_steps or is_time(config.validate_every)
        return cls(validate, validate or is_time(config.log_every), validate or is_time(config.checkpoint_every))
