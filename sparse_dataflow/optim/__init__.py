"""Optimizers, the state that they advance, and losses that are out of line."""
