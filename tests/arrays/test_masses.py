import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elsaa_jax.arrays.masses import dot_rows
from tests.compilation import optimized

ROWS = jax.ShapeDtypeStruct((2, 300, 4, 64), jnp.float32)
SECOND = {  # What a cotangent may be: of a sum, of a weighted sum, of one row for all.
    "ones": lambda rng: jnp.ones(ROWS.shape),
    "numbers": lambda rng: jnp.broadcast_to(jax.random.normal(rng, ROWS.shape[:3])[..., None], ROWS.shape),
    "row": lambda rng: jnp.broadcast_to(jax.random.normal(rng, ROWS.shape[3:]), ROWS.shape),
    "rows": lambda rng: jax.random.normal(rng, ROWS.shape),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SECOND)
def test_dots_of_rows(name, dtype):
    """Of broadcasts too, inside one program: XLA gets some products of these wrong (`race_xla._copies`)."""
    first, rng = jax.random.normal(jax.random.key(0), ROWS.shape).astype(dtype), jax.random.key(1)
    dots = optimized(lambda first: dot_rows(first, SECOND[name](rng)))(first)
    assert dots.dtype == jnp.float32
    second = np.asarray(SECOND[name](rng), np.float64)
    np.testing.assert_allclose(dots, (np.asarray(first, np.float64) * second).sum(-1), rtol=1e-4, atol=1e-4)
