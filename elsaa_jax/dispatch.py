"""Which implementation runs: XLA, or the Pallas kernels of `pallas_kernels`.

  None         at lowering: the kernels on a GPU, XLA elsewhere; XLA everywhere where the kernels refuse the call
  "xla"        XLA
  "pallas"     the kernels; traces anywhere and lowers for a GPU anywhere
  "interpret"  the kernels, run on the CPU by JAX's interpreter: slow, to test them

A name is an order: it fails loudly where it cannot be met. A program that is traced on a machine
without a GPU and lowered for one has the kernels in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from elsaa_jax.checks import check_choice
from elsaa_jax.types import Implementation
from pallas_kernels import configs

IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas", "interpret")


class Route(NamedTuple):
    """The implementation of one call, and how its kernels are cut and compute.

    Attributes:
      implementation: what the caller asked for, or "xla" where the kernels refuse.
      target: the compute capability whose tiles the kernels take, 90 for 9.0.
      arithmetic: "gpu", or what the interpreter does; see `configs.Settings`.
      launcher: "pallas", or "jax-triton" within `configs.use_jax_triton`.
    """

    implementation: Implementation | None
    target: int
    arithmetic: configs.Arithmetic
    launcher: configs.Launcher = "pallas"


XLA = Route("xla", 0, "gpu")


def check(function: str, implementation: Implementation | None) -> None:
    """Raises ValueError for an implementation of a function that has no kernels.

    Args:
      function: name of a public function, for example "performer_attention".
      implementation: what the caller asked for.
    """
    check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    if implementation not in (None, "xla"):
        raise ValueError(
            f"implementation is {implementation!r}, but {function} has no Pallas kernel; it must be None or 'xla'"
        )


def route(implementation: Implementation | None, refusal: str | None) -> Route:
    """What will run. Raises ValueError where the kernels are ordered and refuse.

    Args:
      implementation: what the caller asked for.
      refusal: why the kernels cannot take this call; None: they can.
    """
    check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    if implementation == "xla" or (implementation is None and refusal is not None):
        return XLA
    if refusal is not None:
        raise ValueError(f"implementation is {implementation!r}, but {refusal}; use None or 'xla'")
    arithmetic = configs.interpreter_arithmetic() if implementation == "interpret" else "gpu"
    return Route(implementation, configs.local_target(), arithmetic, configs.launcher())


def choose(route: Route, kernels: Callable[..., Any], xla: Callable[..., Any], *arrays: Any) -> Any:
    """`kernels(*arrays)` or `xla(*arrays)`, decided at lowering where the route leaves it open.

    To be called inside a custom VJP: the choice itself is not differentiated.
    """
    if route.implementation == "xla":
        return xla(*arrays)
    if route.implementation == "interpret":
        return kernels(*arrays)
    otherwise = xla if route.implementation is None else _refuse_like(kernels)
    return lax.platform_dependent(*arrays, cuda=kernels, default=otherwise)


def _refuse_like(kernels: Callable[..., Any]) -> Callable[..., Any]:
    """What "pallas" lowers to without a GPU: an error, in the shape of the results."""

    def refuse(*arrays):
        leaves, tree = jax.tree.flatten(jax.eval_shape(kernels, *arrays))
        shapes = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in leaves)
        return jax.tree.unflatten(tree, _refuse.bind(shapes=shapes))

    return refuse


_refuse = Primitive("elsaa_no_gpu")
_refuse.multiple_results = True
_refuse.def_abstract_eval(lambda *, shapes: shapes)


def _refuse_lowering(context, *, shapes):
    platforms = ", ".join(context.module_context.platforms)
    raise ValueError(
        f"implementation is 'pallas', which runs on a GPU, but this call is lowered for {platforms}; use 'interpret' "
        "to run the kernels on a CPU, or None for the best implementation of each platform"
    )


mlir.register_lowering(_refuse, _refuse_lowering)
