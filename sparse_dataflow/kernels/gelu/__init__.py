"""GELU with a gradient that keeps only its input."""
