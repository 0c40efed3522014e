"""Kernels for chips, which the ops find by name."""
