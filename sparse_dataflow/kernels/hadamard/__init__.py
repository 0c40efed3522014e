"""The Walsh-Hadamard transform of groups of features."""


def factors(width: int) -> tuple[int, int]:
    """The sides of the two Kronecker factors that a transform of `width`, a power of 2, is applied
    as; both close to its root.  Loads no jax."""
    stages = width.bit_length() - 1
    return 1 << stages // 2, 1 << stages - stages // 2
