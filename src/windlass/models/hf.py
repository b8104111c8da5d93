"""Any causal language model of transformers, built from a local config: trained like our own, under its own names.

It can be sharded (none, zero1, zero2, full, hybrid), compiled and recomputed. It has no tensor-parallel plan and is not cut into
pipeline stages; those degrees are refused with a message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.errors import ConfigError
from windlass.models.init import fill_normal
from windlass.models.parts import Model

if TYPE_CHECKING:
    from windlass.config import ModelConfig


class HFModel(Model):
    """The skeleton's interface around a foreign network: `net` holds all parameters, `layers` its blocks for sharding."""

    stackable = False

    def __init__(self, net: nn.Module, seq_len: int) -> None:
        nn.Module.__init__(self)
        config = net.config.get_text_config() if hasattr(net.config, "get_text_config") else net.config
        self.net = net
        self.seq_len, self.vocab, self.width = seq_len, config.vocab_size, config.hidden_size
        self.std = getattr(config, "initializer_range", 0.02)
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.embed = self.norm = self.head = None
        self.position_start, self.table = 0, None
        self.blocks = find_blocks(net)
        self.num_layers = len(self.blocks)
        self._constants = {name: value.clone() for name, value in net.named_buffers() if not value.is_meta}

    @property
    def layers(self) -> Any:
        """Blocks by number; a view, so that parameters keep their one name."""
        return _Blocks(self.blocks)

    def to_empty(self, *, device: Any, recurse: bool = True) -> HFModel:
        """Memory for the parameters; buffers (rotary frequencies) are constants and keep their numbers."""
        super().to_empty(device=device, recurse=recurse)
        for name, value in self._constants.items():
            owner, _, last = name.rpartition(".")
            module = self.net.get_submodule(owner) if owner else self.net
            module._buffers[last] = value.to(device)
        if self.tied:  # memory was given to both names of the one weight
            self.net.tie_weights()
        return self

    def prepare(self, device: torch.device | str) -> None:
        if any(getattr(block, "recompute", "none") != "none" for block in self.blocks):
            self.net.gradient_checkpointing_enable({"use_reentrant": False})

    def filler(self, name: str) -> Callable[[Tensor, torch.Generator], None]:
        if name.endswith("bias"):
            return lambda tensor, generator: tensor.zero_()
        if "norm" in name.lower() or ".ln_" in name:
            return lambda tensor, generator: tensor.fill_(1.0)
        return partial(fill_normal, std=self.std)

    def forward(self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        if documents is not None:
            raise ConfigError(
                "data.mask_documents is not supported with model.family = hf", hint="use family llama, or leave it off"
            )
        logits = self.net(input_ids=x, use_cache=False).logits
        if targets is None:
            return logits
        entropy = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return torch.stack((entropy, entropy.detach()))


class _Blocks(dict[str, nn.Module]):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__({str(i): block for i, block in enumerate(blocks)})


def find_blocks(net: nn.Module) -> list[nn.Module]:
    """The longest list of alike modules: the decoder's layers."""
    lists = [m for m in net.modules() if isinstance(m, nn.ModuleList) and len({type(b) for b in m}) == 1]
    return list(max(lists, key=len)) if lists else []


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters without memory, buffers with: transformers computes some constants while it builds."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = register
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = original


def build_hf(config: ModelConfig, seq_len: int) -> HFModel:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            'model.family = "hf" needs the transformers package', hint="pip install 'windlass[eval]'"
        ) from None
    path = Path(config.config or "")
    if not path.exists():
        raise ConfigError(
            f"model.config: there is no {path}", hint="name a folder or file with a Hugging Face config.json"
        )
    read = AutoConfig.from_pretrained(path if path.is_dir() else path.parent, local_files_only=True)
    limit = getattr(read, "max_position_embeddings", None)
    if limit is not None and seq_len > limit:
        raise ConfigError(
            f"data.seq_len ({seq_len:,}) is more than the model's {limit:,} positions",
            hint="choose a shorter sequence or another config",
        )
    meta = torch.empty(0).is_meta
    with parameters_on_meta() if meta else contextlib.nullcontext():
        net = AutoModelForCausalLM.from_config(read, attn_implementation="sdpa", dtype=torch.float32)
    net.tie_weights()
    return HFModel(net, seq_len)
