"""Any causal language model of transformers, built from a local config: trained like our own, under its own names.

It can be sharded (none, zero1, zero2, full, hybrid), compiled and recomputed. It has no tensor-parallel plan and is not cut into
pipeline stages; those degrees are refused with a message.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from windlass.errors import ConfigError
from windlass.models.init import fill_normal, fill_parameter
from windlass.models.loss import entropy_sums
from windlass.models.parts import Model

if TYPE_CHECKING:
    from windlass.config import ModelConfig


class HFModel(Model):
    """The skeleton's interface around a foreign network: `net` holds all parameters, `layers` its blocks for sharding."""

    stackable = False
    has_dropout = True

    def __init__(self, net: nn.Module, seq_len: int) -> None:
        nn.Module.__init__(self)
        config = net.config.get_text_config() if hasattr(net.config, "get_text_config") else net.config
        self.net = net
        self.seq_len, self.vocab, self.width = seq_len, config.vocab_size, config.hidden_size
        self.std = getattr(config, "initializer_range", 0.02)
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self.twins = twins_of(net)
        self.embed = self.norm = self.head = None
        self.position_start, self.table = 0, None
        self.blocks = find_blocks(net)
        self.num_layers = len(self.blocks)
        self.z_loss = 0.0
        """Set by `train.parallelize`: there is no head of ours that would know it."""
        modules = dict(self.named_modules())
        self.undecayed = frozenset(f"{name}.weight" for name, part in modules.items() if isinstance(part, nn.Embedding))
        blocks = set(map(id, self.blocks))
        inside = tuple(f"{name}." for name, part in modules.items() if id(part) in blocks)
        self._patterns = {
            name: copy.deepcopy(part).to("meta")
            for name, part in modules.items()
            if id(part) in blocks or (owns_parameters(part) and not name.startswith(inside))
        }
        """Blocks, and what owns parameters beside them, without memory: the network's own rule fills one at a time."""
        self._begun: tuple[Any, nn.Module] | None = None
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

    def init_weights(self, seed: int) -> None:
        super().init_weights(seed)
        self._begun = None

    def fill(self, name: str, tensor: Tensor, seed: int) -> None:
        """As transformers itself begins it: Gemma's norms at zero, GPT-2's last products smaller. Its rules see whole modules."""
        unit = max((u for u in self._patterns if name.startswith(f"{u}.")), key=len)
        fill_parameter(tensor, f"{seed}/{unit}", partial(self._fill_as_theirs, name, unit))

    @torch.no_grad()
    def _fill_as_theirs(self, name: str, unit: str, tensor: Tensor, generator: torch.Generator) -> None:
        begun = self._begin(unit, tensor.device, generator.initial_seed()).get_parameter(name.removeprefix(f"{unit}."))
        if begun.isnan().any():
            _fill_by_name(name, tensor, generator, self.std)
        else:
            tensor.copy_(begun)

    def _begin(self, unit: str, device: torch.device, seed: int) -> nn.Module:
        """One unit with its first numbers; kept until the next one is asked for, because its parameters come one after another."""
        key = unit, device, seed
        if self._begun is None or self._begun[0] != key:
            self._begun = None
            made = copy.deepcopy(self._patterns[unit]).to_empty(device=device)
            for parameter in made.parameters():
                parameter.fill_(float("nan"))  # what the network's rule leaves alone is then seen
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                made.apply(self.net._init_weights)
            self._begun = key, made
        return self._begun[1]

    def forward(self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        if documents is not None:
            raise ConfigError(
                "models.data-mask-documents-supported",
                "data.mask_documents is not supported with model.family = hf",
                hint="use family llama, or leave it off",
            )
        logits = self.net(input_ids=x, use_cache=False).logits
        if targets is None:
            return logits
        return entropy_sums(logits.flatten(0, 1).float(), targets.flatten(), self.z_loss)


def _fill_by_name(name: str, tensor: Tensor, generator: torch.Generator, std: float) -> None:
    """Where a network has no rule of its own for a parameter."""
    if name.endswith("bias"):
        tensor.zero_()
    elif "norm" in name.lower() or ".ln_" in name:
        tensor.fill_(1.0)
    else:
        fill_normal(tensor, generator, std)


def twins_of(net: nn.Module) -> dict[str, str]:
    """Names under which a weight stands a second time (a tied head) -> its first name, both as in our state."""
    first: dict[int, str] = {}
    named = [(f"net.{name}", id(weight)) for name, weight in net.named_parameters(remove_duplicate=False)]
    return {name: first[key] for name, key in named if first.setdefault(key, name) != name}


class _Blocks(dict[str, nn.Module]):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__({str(i): block for i, block in enumerate(blocks)})


def owns_parameters(part: nn.Module) -> bool:
    return next(part.parameters(recurse=False), None) is not None


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
    # transformers imports torchao where it is installed, which on a CPU says of each of its GPU libraries that it cannot be loaded.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            "models.model-family-hf-needs",
            'model.family = "hf" needs the transformers package',
            hint="pip install 'windlass[eval]'",
        ) from None
    path = Path(config.config or "")
    if not path.exists():
        raise ConfigError(
            "models.model-config",
            f"model.config: there is no {path}",
            hint="name a folder or file with a Hugging Face config.json",
        )
    try:
        read = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError) as error:  # a family that this transformers does not know
        raise ConfigError(
            "models.transformers-cannot-read",
            f"transformers cannot read {path}: {str(error).splitlines()[0]}",
            hint="a newer transformers may know it; families that need code of their own (trust_remote_code) are not run",
        ) from None
    limit = getattr(read, "max_position_embeddings", None)
    if limit is not None and seq_len > limit:
        raise ConfigError(
            "models.data-seq-len-model",
            f"data.seq_len ({seq_len:,}) is more than the model's {limit:,} positions",
            hint="choose a shorter sequence or another config",
        )
    meta = torch.empty(0).is_meta
    with parameters_on_meta() if meta else contextlib.nullcontext():
        net = _with_attention(AutoModelForCausalLM, read)
    net.tie_weights()
    return HFModel(net, seq_len)


def _with_attention(builder: Any, config: Any) -> Any:
    """Fused attention, or the plain one for families that transformers has no fused one for (Bloom, MPT, Gemma 2)."""
    try:
        return builder.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return builder.from_config(config, attn_implementation="eager", dtype=torch.float32)
