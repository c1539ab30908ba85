"""Rows that are gathered and scattered by index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from elsaa_jax.blocks import tiles
from tests.compilation import optimized


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("width", [1, 64, 65])
def test_rows_are_gathered_bit_by_bit(dtype, width):
    rows = jax.random.normal(jax.random.key(0), (50, width)).astype(dtype)
    rows = rows.at[3].set(jnp.nan).at[4].set(-jnp.inf).at[5].set(-0.0).at[49].set(jnp.nan)
    index = jnp.asarray([[0, 3, 4, 5, 49], [50, 7, 7, 50, 2**31 - 1]], jnp.int32)
    found = np.asarray(optimized(tiles._take_rows)(rows, index)).view(f"u{rows.itemsize}")
    expected = np.asarray(jnp.concatenate([rows, jnp.zeros((1, width), dtype)]))[np.minimum(index, 50)]
    np.testing.assert_array_equal(found, expected.view(f"u{rows.itemsize}"))


def test_rows_are_scattered():
    rows, values = jnp.zeros((6, 3)), jnp.arange(12.0).reshape(2, 2, 3)
    index = jnp.asarray([[4, 1], [6, 1]], jnp.int32)
    expected = np.zeros((6, 3))
    expected[4], expected[1] = values[0, 0], values[0, 1] + values[1, 1]
    np.testing.assert_array_equal(tiles._scatter(lax.scatter_add, rows, index, values), expected)
    expected[1] = values[0, 1]
    index = jnp.asarray([[4, 1], [6, 7]], jnp.int32)
    np.testing.assert_array_equal(tiles._scatter(lax.scatter, rows, index, values), expected)
