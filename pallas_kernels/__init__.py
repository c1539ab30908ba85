"""Pallas GPU kernels: arrays in, arrays out. No kernel imports anything of `elsaa_jax`; the check of them does.

configs          tiles, warps and stages by kernel, dtype, head dimension and target; what is refused
launch           the one way in which a kernel is called, and its loads, stores and dots
block_attention  the sparse branch and exact attention: rows through index arrays
triton_route     block attention forward as a Triton kernel that jax-triton launches
soft_codes       soft codes of RACE inside a kernel
fusion           the fusion of both branches, in the readout of RACE
race             RACE forward: summaries and readout
race_backward    RACE backward
check            what can be proved without a GPU: `python -m pallas_kernels.check`
"""
