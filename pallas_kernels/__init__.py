"""GPU kernels of ELSAA, written in Pallas. Each is a function from arrays to arrays.

The kernels import nothing from `elsaa_jax`, which calls them through `elsaa_jax/blocks/kernels.py` and
`elsaa_jax/low_rank/race_kernels.py`. Only the check imports `elsaa_jax`. docs/kernels.md explains the kernels.

configs          tiles, warps and stages of every kernel; which calls the kernels refuse; `use_target`, `use_jax_triton`
                 and `emulate_tf32`
launch           the one function that calls a kernel; loads, stores and dots that all kernels share
plan             arguments of block attention: the plan, the scale and the causal mask
block_attention  sparse branch and exact attention, forward and backward; chooses the launcher of the forward pass
triton_route     the same forward pass as a Triton kernel that jax-triton launches
soft_codes       soft codes of RACE, inside a kernel
fusion           fusion of the two branches, inside the readout kernel of RACE
race             RACE forward: summary and readout
race_backward    RACE backward: gradients at the queries and at the keys
check            checks that need no GPU: `python -m pallas_kernels.check`

Each module imports only modules above it, except that `block_attention` imports `triton_route` when it is used.
"""
