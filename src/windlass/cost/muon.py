"""How Muon divides its work: rules that the engine and the planner share. No torch."""

# Numbers of the full matrices that one rank orthogonalises at once: 512 MiB in 16 bits.
ROUND_SIZE = 2**28
ITERATIONS = 5


def grouped_iterations(short: int, long: int) -> tuple[int, ...]:
    """How many of the Newton-Schulz iterations of a short x long matrix are combined into one factor at a time.

    Combining saves products with the long side and needs more of short x short matrices (`square_products`). At most
    three are combined, because rounding errors of the Gram matrix grow with each."""
    return (2, 3) if long >= 2 * short else (1,) * ITERATIONS


def square_products(iterations: int) -> int:
    """Products of short x short matrices for one factor: the square of each Gram matrix, and for each iteration after
    the first two products for its Gram matrix and one that multiplies the factors."""
    return iterations + 3 * (iterations - 1)
