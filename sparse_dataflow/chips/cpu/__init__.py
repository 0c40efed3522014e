"""Kernels for CPUs in C++, which are compiled where a compiler is."""
