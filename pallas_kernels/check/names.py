"""Names of the check's steps and of the GPU generations it compiles for. Needs no import of JAX."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Step: TypeAlias = Literal["numerics", "addresses", "compilation", "jax-triton", "layers"]
STEPS: tuple[Step, ...] = get_args(Step)
TargetName: TypeAlias = Literal["sm_80", "sm_90", "sm_100", "sm_120"]
TARGET_NAMES: tuple[TargetName, ...] = get_args(TargetName)
