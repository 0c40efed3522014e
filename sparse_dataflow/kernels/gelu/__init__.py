"""GELU whose gradient saves only the input."""
