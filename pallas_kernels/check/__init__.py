"""Checks of the kernels that need no GPU: `python -m pallas_kernels.check`.

__main__    the command: runs the steps, prints tables, exits with 1 after a failure
names       names of the steps and of the GPU generations
numerics    step "numerics": errors of the kernels in JAX's interpreter
addresses   step "addresses": runs the kernels on their Triton IR, with planted faults
triton_ir   the NumPy interpreter of Triton IR that `addresses` uses
compiling   step "compilation": the GPU compiler, registers, spills, tensor cores
cases       the kernel calls that are compiled
targets     descriptions of the GPUs that kernels are compiled for
jax_triton  step "jax-triton": the Triton kernel that jax-triton launches
layers      step "layers": kernels and memory of a whole layer
"""
