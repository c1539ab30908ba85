"""The GPUs that kernels are compiled for, described in words: no device is needed."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies


class Target(NamedTuple):
    """One GPU, as XLA wants it described.

    Attributes:
      name: of the table, "sm_90".
      architecture: what ptxas is told; with the features of exactly this one where there are any.
      device: a GPU of this generation.
      capability: major and minor number.
      cores: multiprocessors.
      units: float32 units of a core.
      core_shared: bytes of shared memory of a core.
      block_shared: bytes of shared memory that a program may ask for.
      cache: bytes of the second-level cache.
      bandwidth: bytes a second.
      clock: GHz.
      memory: bytes.
      threads: of a core, at most.
    """

    name: str
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
        """The target as XLA's text format has it."""
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
        """What lowering takes place in: from JAX 0.11 on it compiles kernels, and must be told what for."""
        if jax.__version_info__ < (0, 11):
            return contextlib.nullcontext()
        from jax._src.mesh import AbstractDevice

        device: Any = AbstractDevice(self.device, None, "cuda")
        types = (jax.sharding.AxisType.Auto,)
        mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=types, abstract_device=device)
        return jax.sharding.use_abstract_mesh(mesh)

    def sharding(self) -> Any:
        """Where the arguments of a compilation for this target lie."""
        topology = topologies.get_topology_desc(platform="cuda", target_config=self.text, topology="1x1x1")
        return jax.sharding.SingleDeviceSharding(topology.devices[0])


TARGETS = {
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
