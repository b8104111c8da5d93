"""Embedding rows divided over tensor-parallel ranks."""

import warnings
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from windlass.blocks.divide import by_rows, first_row
from windlass.blocks.embedding.module import TokenEmbedding

# The embedding returns this rank's part of a divided tensor, which is a view; nothing here writes into it.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


def parallelize(embedding: TokenEmbedding, tensor_mesh: DeviceMesh) -> None:
    embedding.weight = by_rows(embedding.weight, tensor_mesh)
    embedding.lookup = partial(parallel_lookup, mesh=tensor_mesh)


def parallel_lookup(tokens: Tensor, weight: DTensor, *, mesh: DeviceMesh) -> Tensor:
    """This rank's stretch of the sequence, looked up by whichever rank holds the row.

    torch's own row-wise embedding has no rule for its backward pass that keeps rows divided: the gradient was as
    large as the full table on every rank. Here it is made from the local rows and stays as small as they are."""
    part = weight.to_local()
    index = tokens - first_row(weight, mesh)
    elsewhere = (index < 0) | (index >= part.shape[0])
    vectors = F.embedding(index.masked_fill(elsewhere, 0), part).masked_fill(elsewhere.unsqueeze(-1), 0.0)
    return (
        DTensor.from_local(vectors, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)]).to_local()
    )
