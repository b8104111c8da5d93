"""Every family with modules of ours computes what transformers' own class computes, and comes back byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from windlass.config import load_recipe
from windlass.convert.export import export
from windlass.convert.imports import import_model
from windlass.convert.source import find_source, load_model
from windlass.evaluate.generate import TextDecoder

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 150,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "rope_theta": 500_000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
        "beta_slow": 1.0, "rope_theta": 10_000.0}  # fmt: skip
TWO = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0}}
MSCALE = YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}
GPT_OSS = {"num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
            "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 8}  # fmt: skip
MAMBA = {"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 2, "chunk_size": 16}
# Family, transformers' class, what differs from SMALL.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "LlamaConfig", {"rope_parameters": LLAMA3}),
    ("llama", "LlamaConfig", {"rope_parameters": YARN}),
    ("llama", "LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}),
    ("qwen3", "Qwen3Config", {"tie_word_embeddings": True}),
    ("olmo2", "Olmo2Config", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    ("olmo3", "Olmo3Config", {"num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 8}),
    ("olmo3", "Olmo3Config", {"num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 200, "rope_parameters": TWO}),
    ("smollm3", "SmolLM3Config", {"num_attention_heads": 3, "num_key_value_heads": 1}),
    ("apertus", "ApertusConfig", {"num_attention_heads": 3, "num_key_value_heads": 1}),
    ("nemotron", "NemotronConfig", {}),
    ("gemma3", "Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}),
    ("gemma3", "Gemma3TextConfig", {"sliding_window": 8, "rope_parameters": TWO}),
    ("mixtral", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_moe", "Qwen3MoeConfig", {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [0, 1]}),
    ("qwen3_moe", "Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}),
    ("qwen2", "Qwen2Config", {"num_attention_heads": 3, "num_key_value_heads": 1}),
    ("gpt_oss", "GptOssConfig", GPT_OSS | {"sliding_window": 8}),
    ("gpt_oss", "GptOssConfig", GPT_OSS | {"sliding_window": 200, "swiglu_limit": 0.3, "rope_parameters": YARN}),
    ("deepseek_v2", "DeepseekV2Config", DEEPSEEK | {"q_lora_rank": None}),
    ("deepseek_v2", "DeepseekV2Config", DEEPSEEK | {"rope_parameters": MSCALE, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}),
    ("deepseek_v3", "DeepseekV3Config", DEEPSEEK | {"n_group": 4, "topk_group": 2, "rope_parameters": MSCALE}),
    ("deepseek_v3", "DeepseekV3Config", DEEPSEEK | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "norm_topk_prob": False}),
    ("olmoe", "OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ("nemotron_h", "NemotronHConfig", {"hybrid_override_pattern": "M-M*-M", "time_step_min": 0.02, **MAMBA}),
    ("nemotron_h", "NemotronHConfig", {"hybrid_override_pattern": "ME*EME", "n_routed_experts": 5, "num_experts_per_tok": 2,
      "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5, **MAMBA}),
]  # fmt: skip


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    family, name, changes = request.param
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SMALL | changes, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, so that none of them is left at its initial value
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(tmp_path / "theirs")
    return family, tmp_path / "theirs"


@pytest.mark.parametrize("folder", CASES, indirect=True, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_a_family_is_imported_and_exported(folder: tuple[str, Path], tmp_path: Path) -> None:
    family, theirs = folder
    imported = import_model(theirs, tmp_path / "run")
    assert imported.family == family and imported.check is not None and imported.check.difference < 1e-5
    assert any("multi-token" in note for note in imported.notes) == (family == "deepseek_v3")
    export(tmp_path / "run", tmp_path / "ours")
    before, after = load_file(theirs / "model.safetensors"), load_file(tmp_path / "ours" / "model.safetensors")
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)

    written = load_recipe(tmp_path / "run/recipe.toml", ["train.steps=1"]).recipe.model
    assert written == find_source(tmp_path / "run").recipe.model

    # Packed documents see what each sees alone; generation token by token what a forward pass sees.
    source = find_source(tmp_path / "run")
    model = load_model(source.recipe, source.folder, torch.device("cpu"), torch.float32)
    tokens = torch.randint(1, 150, (1, 40))
    whole = model(tokens)
    assert torch.allclose(model(tokens[:, :25]), whole[:, :25], atol=1e-5)
    numbers = torch.tensor([[0] * 25 + [1] * 15])
    apart = model(tokens, None, numbers)
    assert torch.allclose(apart[:, :25], whole[:, :25], atol=1e-5)
    assert not torch.allclose(apart[:, 25:], whole[:, 25:], atol=1e-3)
    decoder = TextDecoder(model, 1, 40)
    by_token = [decoder.feed(tokens[:, :25]), decoder.feed(tokens[:, 25:26]), decoder.feed(tokens[:, 26:30])]
    by_token.append(decoder.run(tokens[:, 30:31], torch.tensor([30]), None))  # as recorded on a GPU
    assert torch.allclose(torch.stack(by_token, 1), whole[:, [24, 25, 29, 30], :150], atol=1e-5)
