"""Descriptions of NVIDIA and AMD GPUs for the GPU compiler, so that it compiles without one.

Sources: limits of a compute capability, CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability"; multiprocessors, boost clock, L2 cache, memory and bandwidth, NVIDIA's data
sheets and architecture white papers of the SXM boards, of the L4 and of the T4; of AMD, data sheets
and the white papers of CDNA 2 and CDNA 3.

Importing this module loads no jax.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """One GPU.

    Attributes:
      device_kind: jax's name of the device.
      capability: (major, minor) compute capability.
      multiprocessors: number of streaming multiprocessors.
      float32_units: float32 units of a multiprocessor.
      clock_ghz: boost clock.
      threads: resident threads of a multiprocessor.
      shared_kib: shared memory of a multiprocessor; a block can use 1 KiB less from Ampere on.
      l2_mib: L2 cache.
      memory_gb: device memory, 1e9 bytes.
      bandwidth_gb: of the device memory, 1e9 bytes/s.
      tflops: of its fastest dtype among bfloat16 and float32 (no T4 has tensor cores for them).
    """

    device_kind: str
    capability: tuple[int, int]
    multiprocessors: int
    float32_units: int
    clock_ghz: float
    threads: int
    shared_kib: int
    l2_mib: int
    memory_gb: int
    bandwidth_gb: int
    tflops: float
    platform = "cuda"

    def text(self) -> str:
        """Returns XLA's `GpuTargetConfigProto` of this GPU, in text form."""
        major, minor = self.capability
        # Kernels for tensor cores from Hopper on use features of this very architecture.
        features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        shared = self.shared_kib * 1024
        return f"""
platform_name: "CUDA"
device_description_str: "{self.device_kind}"
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  core_count: {self.multiprocessors}
  fpus_per_core: {self.float32_units}
  clock_rate_ghz: {self.clock_ghz}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {self.threads}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared - (1024 if major >= 8 else 0)}
  shared_memory_per_core: {shared}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: {self.l2_mib * 2**20}
  device_memory_size: {self.memory_gb * 10**9}
  memory_bandwidth: {self.bandwidth_gb * 10**9}
}}
dnn_version_info {{ major: 9 minor: 10 }}
"""


@dataclasses.dataclass(frozen=True)
class AmdTarget:
    """One AMD GPU as jax sees it: half an MI250X, a whole MI300X.

    Attributes:
      device_kind: jax's name of the device.
      architecture: name that the compiler has for it.
      compute_units: number of compute units, with 64 KiB of shared memory each.
      clock_ghz: peak engine clock.
      l2_mib: L2 cache, of an MI300X that of one of its eight dies.
      memory_gb: device memory, 1e9 bytes.
      bandwidth_gb: of the device memory, 1e9 bytes/s.
    """

    device_kind: str
    architecture: str
    compute_units: int
    clock_ghz: float
    l2_mib: int
    memory_gb: float
    bandwidth_gb: int
    platform = "rocm"

    def text(self) -> str:
        """Returns XLA's `GpuTargetConfigProto` of this GPU, in text form."""
        return f"""
platform_name: "ROCM"
device_description_str: "{self.device_kind}"
gpu_device_info {{
  rocm_compute_capability {{ gcn_arch_name: "{self.architecture}:sramecc+:xnack-" }}
  core_count: {self.compute_units}
  fpus_per_core: 128
  clock_rate_ghz: {self.clock_ghz}
  threads_per_warp: 64
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 65536
  shared_memory_per_block_optin: 65536
  shared_memory_per_core: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: {self.l2_mib * 2**20}
  device_memory_size: {int(self.memory_gb * 10**9)}
  memory_bandwidth: {self.bandwidth_gb * 10**9}
}}
dnn_version_info {{ major: 3 minor: 5 }}
"""


AMD_TARGETS = {
    "mi250x": AmdTarget("AMD Instinct MI250X", "gfx90a", 110, 1.7, 8, 68.7, 1638),
    "mi300x": AmdTarget("AMD Instinct MI300X", "gfx942", 304, 2.1, 4, 192, 5300),
}
"""AMD GPUs by name."""

TARGETS = {
    "t4": GpuTarget("Tesla T4", (7, 5), 40, 64, 1.59, 1024, 64, 4, 16, 320, 8.1),
    "a100": GpuTarget("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2048, 164, 40, 85, 2039, 312),
    "l4": GpuTarget("NVIDIA L4", (8, 9), 58, 128, 2.04, 1536, 100, 48, 24, 300, 121),
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 2048, 228, 50, 85, 3350, 989.4
    ),
    "h200": GpuTarget("NVIDIA H200", (9, 0), 132, 128, 1.98, 2048, 228, 50, 150, 4800, 989.4),
    "b200": GpuTarget("NVIDIA B200", (10, 0), 148, 128, 1.97, 2048, 228, 126, 192, 8000, 2250),
}
"""NVIDIA GPUs by name."""
