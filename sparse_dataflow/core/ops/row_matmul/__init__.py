"""The product with a weight that stores groups of one input and several neighbouring outputs."""

ROW_WIDTHS = (8, 16, 32, 64)
"""Outputs of a row."""


def row_width(outputs: int) -> int:
    """Returns the widest row that divides a number of neighbouring outputs; 0 if none does."""
    return max((width for width in ROW_WIDTHS if outputs % width == 0), default=0)
