"""The kernels with JAX_ENABLE_X64=1: float32 and bfloat16 inputs give the same numbers as without it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.check import cases, triton_ir
from pallas_kernels.plan import Plan
from tests.compilation import TRITON_IR

CASES = [case for case in cases.all_cases(whole=True) if (case.head_dim, case.block) == (32, 64)]
HARDEST = [case for case in CASES if case.form in cases.HARDEST_FORMS and case.dtype == "float32"]


def _name(case):
    return "-".join(map(str, case))


def _arrays(arguments):
    """Fills the shapes of a case with numbers; every tile attends to every block."""
    rng = np.random.default_rng(0)

    def fill(x):
        if x.dtype == jnp.int8:
            return np.ones(x.shape, x.dtype)
        return np.abs(rng.normal(size=x.shape)).astype(x.dtype)

    def plan(x):
        rows = [np.arange(a.size, dtype=np.int32).reshape(a.shape) for a in (x.query_rows, x.key_rows)]
        tiles, blocks = (len(a) for a in rows)
        bounds = (0, tiles), (blocks, tiles), (0, blocks), (tiles, blocks)
        return Plan(*rows, *(np.full(number, value, np.int32) for value, number in bounds))

    return jax.tree.map(
        lambda x: plan(x) if isinstance(x, Plan) else fill(x), arguments, is_leaf=lambda x: isinstance(x, Plan)
    )


@pytest.mark.parametrize("case", HARDEST, ids=_name)
def test_the_interpreter_gives_the_same_numbers(case, monkeypatch):
    monkeypatch.setattr(cases, "LENGTH", 64)
    settings_of = cases.settings_of
    monkeypatch.setattr(cases, "settings_of", lambda *a: settings_of(*a)._replace(arithmetic="float32"))
    function, arguments = cases.build(case, 90, None)
    arrays = _arrays(arguments)
    expected = jax.jit(function)(*arrays)
    with jax.enable_x64(True):
        found = jax.jit(function)(*arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-6, atol=1e-6)


@TRITON_IR
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_no_array_of_a_gpu_kernel_has_64_bits(case):
    function, arguments = cases.build(case, 90, None)
    with jax.enable_x64(True):
        (kernel,) = triton_ir.kernels_of(triton_ir.lower(function, *arguments))
    # Scalars may have 64 bits: the compiler folds them.
    assert not re.findall(r"tensor<[^>]*[fi]64>", triton_ir.text_of(kernel))
