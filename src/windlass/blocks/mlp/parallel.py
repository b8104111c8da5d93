"""Feed-forward block divided over tensor-parallel ranks."""

from windlass.blocks.divide import Meshes, divide_columns_then_rows
from windlass.blocks.mlp.module import Mlp


def parallelize(block: Mlp, meshes: Meshes) -> None:
    if meshes.tensor is not None:
        divide_columns_then_rows(block, meshes.tensor, ("w1",) if block.w3 is None else ("w1", "w3"), "w2")
