"""Any causal language model of transformers, built from a local config and trained under its own parameter names.

It can be sharded (none, zero1, zero2, full, hybrid, hybrid_zero2), compiled and recomputed. It is not divided by
tensor, pipeline or context parallelism; `layout.rules` refuses those degrees."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from windlass.blocks.head.loss import entropy_sums
from windlass.blocks.initial_values import fill_normal, fill_parameter
from windlass.config import ModelConfig
from windlass.errors import ConfigError
from windlass.models.decoder import DecoderModel
from windlass.models.presets.hf import import_transformers, refuse_custom_code

# Settings of decoders in which a position sees later ones (Gemma, XLNet).
LATER_TOKENS = {"use_bidirectional_attention": True, "is_causal": False, "attn_type": "bi"}


def refuse_later_tokens(origin: str) -> ConfigError:
    return ConfigError(
        "model.not-causal",
        f"{origin}: it attends to later tokens, so it cannot predict the next one",
        hint="use a model whose attention is causal",
    )


class HFModel(DecoderModel):
    """The decoder's interface around a model of transformers: `net` holds all parameters."""

    divisible = False
    has_dropout = True

    def __init__(self, net: Any, seq_len: int) -> None:
        nn.Module.__init__(self)
        config = net.config.get_text_config() if hasattr(net.config, "get_text_config") else net.config
        self.net = net
        self.seq_len, self.vocab, self.width = seq_len, config.vocab_size, config.hidden_size
        # RoBERTa and XLM-R count positions from that of the padding token on.
        for name, part in net.named_modules():
            if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
                refuse_long(seq_len, part.num_embeddings - part.padding_idx - 1)
        self.init_std = getattr(config, "initializer_range", 0.02)
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        # Second names of a weight (a tied head) -> its first name, both as in our state.
        first: dict[int, str] = {}
        named = [(f"net.{name}", id(weight)) for name, weight in net.named_parameters(remove_duplicate=False)]
        self.twins = {name: first[key] for name, key in named if first.setdefault(key, name) != name}
        self.embed = self.norm = self.head = None
        self.position_start = 0
        # The longest list of equal modules: the decoder's layers.
        lists = [list(m) for m in net.modules() if isinstance(m, nn.ModuleList) and len({type(b) for b in m}) == 1]
        self.hf_layers: list[nn.Module] = max(lists, key=len, default=[])
        self.num_layers = len(self.hf_layers)
        self.layers = nn.ModuleDict()  # parameters keep their one name, inside `net`
        self.z_loss, self.recompute = 0.0, "none"
        modules = dict(self.named_modules())
        self.undecayed = frozenset(f"{name}.weight" for name, part in modules.items() if isinstance(part, nn.Embedding))
        layers = set(map(id, self.hf_layers))
        inside = tuple(f"{name}." for name, part in modules.items() if id(part) in layers)
        # Layers, and what owns parameters beside them, without memory: the model's own rule initialises one at a time.
        self._templates = {
            name: copy.deepcopy(part).to("meta")
            for name, part in modules.items()
            if id(part) in layers
            or (next(part.parameters(recurse=False), None) is not None and not name.startswith(inside))
        }
        self._initialised: tuple[Any, nn.Module] | None = None
        self._constants = {name: value.clone() for name, value in net.named_buffers() if not value.is_meta}

    def layer_modules(self) -> list[nn.Module]:
        return self.hf_layers

    def set_recompute(self, policy: str) -> None:
        self.recompute = policy

    def to_empty(self, *, device: Any, recurse: bool = True) -> HFModel:
        """Memory for the parameters; buffers (rotary frequencies) are constants and keep their values."""
        super().to_empty(device=device, recurse=recurse)
        for name, value in self._constants.items():
            owner, _, last = name.rpartition(".")
            self.net.get_submodule(owner)._buffers[last] = value.to(device)
        if self.tied:  # memory was given to both names of the one weight
            self.net.tie_weights()
        return self

    def prepare(self, device: torch.device | str, length: int | None = None) -> None:
        if self.recompute != "none":
            self.net.gradient_checkpointing_enable({"use_reentrant": False})

    def init_weights(self, seed: int) -> None:
        super().init_weights(seed)
        self._initialised = None

    def fill(self, name: str, tensor: Tensor, seed: int) -> None:
        """As transformers itself does: Gemma's norms at zero, GPT-2's last products smaller. Its rules need whole
        modules, of which one is kept until the next is asked for: its parameters come one by one."""
        if ".adapter." in name:  # a LoRA adapter is ours
            DecoderModel.fill(self, name, tensor, seed)
            return
        unit = max((u for u in self._templates if name.startswith(f"{u}.")), key=len)

        def fill_by_their_rule(full: Tensor, generator: torch.Generator) -> None:
            key = unit, full.device, generator.initial_seed()
            if self._initialised is None or self._initialised[0] != key:
                self._initialised = None  # frees the memory of the last one first
                module = copy.deepcopy(self._templates[unit]).to_empty(device=full.device)
                for parameter in module.parameters():
                    parameter.fill_(float("nan"))  # NaN shows what the model's rule does not initialise
                with torch.random.fork_rng([full.device] if full.is_cuda else []):
                    torch.manual_seed(generator.initial_seed())
                    module.apply(self.net._init_weights)
                self._initialised = key, module
            values = self._initialised[1].get_parameter(name.removeprefix(f"{unit}."))
            if not values.isnan().any():
                full.copy_(values)
            elif name.endswith("bias"):  # the model has no rule for this parameter
                full.zero_()
            elif "norm" in name.lower() or ".ln_" in name:
                full.fill_(1.0)
            else:
                fill_normal(full, generator, self.init_std)

        fill_parameter(tensor, f"{seed}/{unit}", fill_by_their_rule)

    def forward(self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        logits: Tensor = self.net(input_ids=x, use_cache=False).logits
        if targets is None:
            return logits
        return entropy_sums(logits.flatten(0, 1).float(), targets.flatten(), self.z_loss)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters without memory, buffers with: transformers computes some constants while it builds."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    cast(Any, nn.Module).register_parameter = register
    try:
        with torch.device("cpu"):
            yield
    finally:
        cast(Any, nn.Module).register_parameter = original


def build_hf(config: ModelConfig, seq_len: int) -> HFModel:
    hf_config = read_hf_config(config, seq_len)
    transformers = import_transformers()

    # transformers builds a "causal" model of an encoder's config too, in which every position sees the later ones: the
    # loss of the next token would be read off the input.
    masked = type(hf_config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    is_encoder = masked and not getattr(hf_config, "is_encoder_decoder", False)
    if is_encoder and not getattr(hf_config, "is_decoder", False):
        raise ConfigError(
            "model.encoder",
            f"{config.config} is an encoder ({hf_config.model_type}): its positions see later tokens, so it predicts "
            "no next token",
            hint='fine-tune it with a [tune] table, use a decoder, or set "is_decoder": true in config.json to train '
            "this architecture with a causal mask",
        )
    text = hf_config.get_text_config()
    later = [f"{key} = {value}" for key, value in LATER_TOKENS.items() if getattr(text, key, None) == value]
    if later:
        raise refuse_later_tokens(f"{config.config} ({later[0]})")
    return HFModel(build_net(transformers.AutoModelForCausalLM, hf_config, Path(config.config or "")), seq_len)


def read_hf_config(config: ModelConfig, seq_len: int) -> Any:
    """transformers' config of a folder or file; refuses sequences that are longer than its positions."""
    try:
        transformers = import_transformers()
    except ImportError:
        raise ConfigError(
            "model.transformers-missing",
            'model.family = "hf" needs the transformers package',
            hint="pip install 'windlass[eval]'",
        ) from None
    path = Path(config.config or "")
    if not path.exists():
        raise ConfigError(
            "model.config-missing",
            f"model.config: {path} does not exist",
            hint="name a folder or file with a Hugging Face config.json",
        )
    try:
        hf_config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:  # a family that this transformers does not know
        refuse_custom_code(path)
        raise ConfigError(
            "model.config-unreadable",
            f"transformers cannot read {path}: {str(error).splitlines()[0]}",
            hint="try a newer version of transformers, which may support it",
        ) from None
    refuse_long(seq_len, getattr(hf_config, "max_position_embeddings", None))
    return hf_config


def refuse_long(seq_len: int, limit: int | None) -> None:
    if limit is not None and seq_len > limit:
        raise ConfigError(
            "model.sequence-too-long",
            f"data.seq_len ({seq_len:,}) is more than the model's {limit:,} positions",
            hint="choose a shorter one (`windlass finetune --length`), or another config",
        )


def build_net(auto_class: Any, hf_config: Any, path: Path) -> Any:
    """A transformers model without weights; under `torch.device("meta")` without memory for its parameters."""
    options = {"config": hf_config, "dtype": torch.float32}
    with parameters_on_meta() if torch.empty(0).is_meta else contextlib.nullcontext():
        try:
            net: Any = auto_class.from_config(**options, trust_remote_code=False, attn_implementation="sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                refuse_custom_code(path)
                raise
            # Families that transformers has no fused attention for (Bloom, MPT, Gemma 2, DeBERTa).
            net = auto_class.from_config(**options, trust_remote_code=False, attn_implementation="eager")
    net.tie_weights()
    return net
