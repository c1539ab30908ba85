"""Descriptions of the GPUs that kernels are compiled for. Compilation needs only the description, not the device."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from pallas_kernels.check.names import TargetName


class Target(NamedTuple):
    """Description of one GPU for XLA's compiler.

    Attributes:
      name: Name of the GPU generation, "sm_90".
      architecture: Architecture for ptxas, with the suffix "a" if the generation has features of its own.
      device: Name of a GPU of this generation.
      capability: Major and minor number of the compute capability.
      cores: Number of multiprocessors.
      units: Number of float32 units of a multiprocessor.
      core_shared: Shared memory of a multiprocessor, in bytes.
      block_shared: Shared memory that one program can use, in bytes.
      cache: Size of the second-level cache, in bytes.
      bandwidth: Memory bandwidth, in bytes per second.
      clock: Clock rate, in GHz.
      memory: Device memory, in bytes.
      threads: Maximum number of threads of a multiprocessor.
    """

    name: TargetName
    architecture: str
    device: str
    capability: tuple[int, int]
    cores: int
    units: int
    core_shared: int
    block_shared: int
    cache: int
    bandwidth: float
    clock: float
    memory: int
    threads: int = 2048

    @property
    def text(self) -> str:
        """Description in XLA's text format."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.core_shared} threads_per_core_limit: {self.threads} core_count: {self.cores}
  fpus_per_core: {self.units} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(self.bandwidth)} l2_cache_size: {self.cache} clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory} shared_memory_per_block_optin: {self.block_shared}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.device}"
"""

    def lowering(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which to lower programs. Since JAX 0.11, lowering needs to know the device."""
        if jax.__version_info__ < (0, 11):
            return contextlib.nullcontext()
        from jax._src.mesh import AbstractDevice

        device: Any = AbstractDevice(self.device, None, "cuda")
        types = (jax.sharding.AxisType.Auto,)
        mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=types, abstract_device=device)
        return jax.sharding.use_abstract_mesh(mesh)

    def sharding(self) -> Any:
        """Returns the sharding of arguments of a program that is compiled for this target."""
        topology = topologies.get_topology_desc(platform="cuda", target_config=self.text, topology="1x1x1")
        return jax.sharding.SingleDeviceSharding(topology.devices[0])


TARGETS: dict[TargetName, Target] = {
    target.name: target
    for target in (
        Target(
            "sm_80",
            "sm_80",
            "NVIDIA A100-SXM4-80GB",
            (8, 0),
            108,
            64,
            167936,
            166912,
            41943040,
            2.039e12,
            1.41,
            84987740160,
        ),
        Target(
            "sm_90",
            "sm_90a",
            "NVIDIA H100 80GB HBM3",
            (9, 0),
            132,
            128,
            233472,
            232448,
            52428800,
            3.35232e12,
            1.98,
            84978434048,
        ),
        Target(
            "sm_100",
            "sm_100a",
            "NVIDIA B200",
            (10, 0),
            148,
            128,
            233472,
            232448,
            132644864,
            7.672e12,
            1.965,
            191504318464,
        ),
        Target(
            "sm_120",
            "sm_120a",
            "NVIDIA RTX PRO 6000 Blackwell",
            (12, 0),
            188,
            128,
            102400,
            101376,
            134217728,
            1.792e12,
            2.6,
            101970870272,
            1536,
        ),
    )
}
