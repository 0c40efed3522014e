"""Page-locked host memory of CUDA devices, as XLA limits it."""

PINNED_SETTING = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable of XLA: limit of page-locked host memory for CUDA devices, in GiB."""
PINNED_GIB = 64
"""Its default (`GetGpuHostAllocator` in XLA's pjrt/gpu/gpu_helpers.cc)."""
