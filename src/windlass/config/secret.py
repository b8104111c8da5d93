"""Which names hold keys and passwords? They may stand in a shell's environment, never in a recipe: a run folder is copied and shown."""

from __future__ import annotations

import re

_NAME = re.compile(
    r"(api_?key|secret|passw(or)?d|credential|private_?key|access_?key|auth_?token|bearer|(^|_)token$|(^|_)key$)",
    re.IGNORECASE,
)


def looks_secret(name: str) -> bool:
    """`WANDB_API_KEY`, `HF_TOKEN`, `password`; not `tokens`, `tokenizer` or `NCCL_DEBUG`."""
    return _NAME.search(name) is not None
