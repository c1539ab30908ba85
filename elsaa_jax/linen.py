"""The linen layer: `from elsaa_jax.linen import ELSAA`."""

from elsaa_jax.layers.linen import ELSAA, Gate

__all__ = ["ELSAA", "Gate"]
