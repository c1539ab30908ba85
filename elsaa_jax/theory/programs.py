"""Counts taken from traced programs: multiply-adds, sorted tokens, and bytes that are kept or temporary.

Functions are traced with the shapes of their arguments; nothing is run. Only `count_temporary_bytes` compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

# Operations whose work a traced program does not show.
OPAQUE = ("pure_callback", "io_callback", "ffi_call", "triton_kernel_call")


def count_multiply_adds(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts the multiply-adds of all matrix products in the traced program of a function.

    A loop counts as often as it runs, and a Pallas kernel as often as its grid has programs. Of two branches the more
    expensive one counts. A loop whose length depends on data is refused, and so is an operation that the program does
    not show, such as a callback.

    Args:
      function: Function of arrays.
      *arguments: Arrays, or `jax.ShapeDtypeStruct`.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax.theory import complexity
      >>> complexity.count_multiply_adds(lambda x, y: x @ y, jnp.ones((3, 5)), jnp.ones((5, 7)))
      105
    """
    return _count(jax.make_jaxpr(function)(*arguments), {"dot_general": _product}, refuse=True)


def count_sorted_tokens(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts the elements that all sorts in the traced program of a function put in order.

    Args:
      function: Function of arrays.
      *arguments: Arrays, or `jax.ShapeDtypeStruct`.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax.theory import complexity
      >>> complexity.count_sorted_tokens(jnp.sort, jnp.ones((3, 5)))
      15
    """
    return _count(jax.make_jaxpr(function)(*arguments), {"sort": _sorted}, refuse=False)


def count_kept_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts the bytes that the forward pass of a function keeps for its backward pass, inputs included.

    Args:
      function: Differentiable function of arrays.
      *arguments: Arrays, or `jax.ShapeDtypeStruct`, with respect to which it is differentiated.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax.theory import complexity
      >>> complexity.count_kept_bytes(lambda x, y: x * y, jnp.ones(3, jnp.float32), jnp.ones(3, jnp.float32))
      24
    """
    kept = jax.eval_shape(lambda *arrays: jax.vjp(function, *arrays)[1], *arguments)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kept))


def count_temporary_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts the bytes that the compiled program of a function allocates beside its inputs and outputs.

    The number is that of the compiler for the default device.

    Args:
      function: Function of arrays.
      *arguments: Arrays, or `jax.ShapeDtypeStruct`.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax.theory import complexity
      >>> complexity.count_temporary_bytes(lambda x: x + 1, jnp.ones(3, jnp.float32))
      0
    """
    analysis: Any = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def count_parameters(parameters: Any) -> int:
    """Counts the numbers in a tree of arrays or shapes, such as the parameters of a layer.

    Args:
      parameters: Tree of arrays, or of `jax.ShapeDtypeStruct`.

    Example:
      >>> import jax.numpy as jnp
      >>> from elsaa_jax.theory import complexity
      >>> complexity.count_parameters({"kernel": jnp.ones((4, 5)), "bias": jnp.ones(5)})
      25
    """
    return sum(math.prod(x.shape) for x in jax.tree.leaves(parameters))


def _count(program: Any, rules: dict[str, Callable[[Any], int]], refuse: bool) -> int:
    """Adds up what `rules` say of each operation, by name, over a program and all programs within it.

    Args:
      program: Traced program.
      rules: Function from an operation to its count, for each operation that counts.
      refuse: Whether to raise ValueError for an operation whose work is not shown.
    """
    total = 0
    for equation in program.eqns:
        name, params = equation.primitive.name, equation.params
        if name in rules:
            total += rules[name](equation)
            continue
        if refuse and name in OPAQUE:
            raise ValueError(f"the program calls {name!r}, whose work it does not show; use implementation='xla'")
        inner = [_count(program, rules, refuse) for program in _programs(params)]
        match name:
            case "while" if any(inner):
                raise ValueError("the program has a loop whose length depends on data; its work cannot be counted")
            case "cond":
                total += max(inner)
            case "scan":
                total += params["length"] * sum(inner)
            case "pallas_call" if any(inner):
                total += _grid_programs(params["grid_mapping"]) * sum(inner)
            case _:
                total += sum(inner)
    return total


def _programs(params: dict[str, Any]) -> list[Any]:
    """Returns the programs within an operation: bodies of loops and kernels, branches, inner functions."""
    return [x for x in jax.tree.leaves(params) if hasattr(x, "eqns")]


def _grid_programs(mapping: Any) -> int:
    """Returns the number of programs in the grid of a Pallas kernel."""
    if mapping.num_dynamic_grid_bounds:
        raise ValueError("the program has a kernel whose grid depends on data; its work cannot be counted")
    return math.prod(mapping.grid)


def _product(equation: Any) -> int:
    """Returns batch x rows x columns x contracted of a dot_general."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _sorted(equation: Any) -> int:
    """Returns the number of elements of the first operand of a sort."""
    return math.prod(equation.invars[0].aval.shape)
