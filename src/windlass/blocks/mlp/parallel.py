"""Feed-forward block divided over tensor-parallel ranks."""

from windlass.blocks.divide import Meshes, divide_columns_then_rows, place_parameters
from windlass.blocks.mlp.module import Mlp, Xielu


def parallelize(block: Mlp, meshes: Meshes) -> None:
    if meshes.tensor is None:
        return
    divide_columns_then_rows(block, meshes.tensor, ("w1",) if block.w3 is None else ("w1", "w3"), "w2")
    if isinstance(block.activation, Xielu):
        place_parameters(block.activation, meshes.tensor, divided=False)
