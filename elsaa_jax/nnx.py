"""The nnx layer: `from elsaa_jax.nnx import ELSAA`."""

from elsaa_jax.layers.nnx import ELSAA, Gate, HashPlanes

__all__ = ["ELSAA", "Gate", "HashPlanes"]
