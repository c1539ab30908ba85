"""Pallas GPU kernels: arrays in, arrays out; nothing of `elsaa_jax` is imported here.

`KERNELS` maps a public function of `elsaa_jax` to its kernel. A function that is not in it
runs in XLA on every platform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType({})
