"""Benchmarks: what the experiments that measure call, and the skeleton that they share."""
