"""The `[layout]` table: how the work is divided over devices. Without the table the planner chooses."""

from typing import Literal

from pydantic import PositiveInt

from windlass.config.base import Table

Shard = Literal["none", "zero1", "zero2", "full", "hybrid"]


class LayoutConfig(Table):
    shard: Shard = "none"
    """none: every device holds everything (DDP). zero1: optimizer states are divided. zero2: gradients too.
    full: weights too (FSDP). hybrid: full inside a group of `shard_size` devices, copies across groups."""
    shard_size: PositiveInt | None = None
    """hybrid: devices that share one copy (default: the devices of a node)."""
    micro_batch: PositiveInt = 1
    """Sequences per device and forward pass."""
    tensor: PositiveInt = 1
    """Tensor-parallel degree (with sequence parallelism)."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel degree."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zbv"] = "1f1b"
    """Order of micro-batches in a pipeline; zbv and interleaved put several stages on a rank."""
    pipeline_chunks: PositiveInt = 2
    """interleaved: model chunks per pipeline rank."""
    context: PositiveInt = 1
    """Context-parallel degree for long sequences."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Keep optimizer states (or parameters too) in host memory."""
    sync: Literal["auto", "every", "last"] = "auto"
    """When gradients are reduced under accumulation: every micro-batch, or once per step where memory allows."""
