"""Optimizer, state, loop, checkpoints and metrics."""
