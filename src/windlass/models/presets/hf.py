"""Folder format of every other causal language model: transformers builds it, and its config.json stays as it came."""

from windlass.models.presets.format import HFFormat

TRANSFORMERS = HFFormat(
    family="hf",
    wraps_transformers=True,
    prefix="net.",
    # GPT-NeoX and Pythia folders call the head otherwise than transformers 5 does.
    older_names={"gpt_neox": {"lm_head.weight": "embed_out.weight"}},
)
