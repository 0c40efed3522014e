"""Estimates of kernels from their compiled schedules, for `schedule_bench`."""
