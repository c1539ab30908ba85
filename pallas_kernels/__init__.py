"""Pallas GPU kernels: arrays in, arrays out; nothing of `elsaa_jax` is imported here.

There is none yet: every function of `elsaa_jax` runs in XLA, on every platform.
"""
