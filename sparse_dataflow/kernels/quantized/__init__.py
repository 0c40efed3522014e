"""Products of 8-bit operands with scales, by the library qwix."""
