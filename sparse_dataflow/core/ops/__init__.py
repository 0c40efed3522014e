"""One folder per op: `NAME_op.py` dispatches, other files are implementations.

Kernels for chips stand in `chips`, and the ops load them by name.
"""
