"""The product with a weight that stores groups of one input and several neighbouring outputs."""

ROW_WIDTHS = (8, 16, 32, 64)
"""Outputs of a row."""
