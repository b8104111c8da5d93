"""Sizes of Muon's work, by which the engine computes and the planner prices. No torch."""

# Numbers of the full matrices that one rank orthogonalises at once: 512 MiB in 16 bits.
ROUND_SIZE = 2**28
ITERATIONS = 5


def grouped_iterations(short: int, long: int) -> tuple[int, ...]:
    """Newton-Schulz iterations of a short x long matrix that are combined before the matrix is multiplied.

    Combined, they are products of short x short matrices, of which three more are needed for each but the last. At most
    three together, because rounding errors of the Gram matrix grow with each."""
    return (2, 3) if long >= 2 * short else (1,) * ITERATIONS


def square_products(iterations: int) -> int:
    """Products of short x short matrices in a group: a square for each polynomial, then three to combine each further
    one (two for the next Gram matrix, one for the product so far)."""
    return iterations + 3 * (iterations - 1)
