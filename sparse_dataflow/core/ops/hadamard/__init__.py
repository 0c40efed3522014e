"""The Walsh-Hadamard transform of groups of features."""


def factors(width: int) -> tuple[int, int]:
    """Return the sides of the two Kronecker factors of a transform of `width`, a power of 2.

    Both are close to the square root of `width`.  Does not import jax.
    """
    exponent = width.bit_length() - 1
    return 1 << exponent // 2, 1 << exponent - exponent // 2
