"""Kernels for GPUs in general, in Pallas for Triton."""
