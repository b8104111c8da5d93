"""Training values of recipes are those that were published, to the last digit; no comment calls a key inexpressible that exists."""

import re
from pathlib import Path

import pytest

from windlass.config import load_recipe

FOLDER = Path(__file__).parents[2] / "recipes"
T, B = 10**12, 10**9
MI = 2**20
ADAMW = {"optim.name": "adamw", "optim.beta1": 0.9, "optim.beta2": 0.95, "optim.weight_decay": 0.1, "optim.clip": 1.0}
APERTUS = {
    "data.tokens": 15 * T, "data.seq_len": 4096, "data.mask_documents": True, "data.reset_positions": True,
    "optim.name": "ademamix", "optim.beta1": 0.9, "optim.beta2": 0.999, "optim.beta3": 0.9999, "optim.alpha": 8.0,
    "optim.slow_warmup": 100_000, "optim.weight_decay": 0.1, "optim.clip": 0.1, "optim.min_lr_ratio": 0.1,
    "optim.schedule": "wsd", "optim.decay_shape": "1-sqrt", "optim.warmup": 4_096_000 * 4096,
    "optim.decay": 403_905_806 * 4096, "train.goldfish_k": 50, "train.goldfish_h": 50, "model.init_std": 0.008944,
}  # fmt: skip
LUCIOLE = ADAMW | {
    "data.tokens": 3 * T, "data.seq_len": 4096, "data.batch_tokens": 4 * MI, "optim.lr": 3e-4, "optim.schedule": "constant",
    "optim.eps": 1e-5, "model.init_std": 0.009,
}  # fmt: skip
OLMO = ADAMW | {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.1, "train.z_loss": 1e-5}
# recipe, what its team published (scripts, configurations and cards named in the notes)
PUBLISHED = {
    "apertus_8b_jupiter": APERTUS | {
        "nodes": 256, "data.batch_tokens": 4 * MI, "data.batch_ramp": [(1_718_272_000 * 4096, 8 * MI)], "optim.lr": 1.1e-4,
    },
    "apertus_70b_jupiter": APERTUS | {
        "nodes": 1024, "data.batch_tokens": 8 * MI, "data.batch_ramp": [(1_072_164_864 * 4096, 16 * MI)], "optim.lr": 1e-5,
    },
    "openeurollm_9b_leonardo": ADAMW | {
        "nodes": 256, "data.tokens": 10 * T, "data.seq_len": 4096, "data.batch_tokens": 8 * MI, "optim.lr": 3.5e-4, "optim.eps": 1e-8,
        "optim.min_lr_ratio": 0.0, "optim.schedule": "wsd", "optim.decay_shape": "linear", "optim.decay": 2 * T,
        "optim.warmup": 4000 * 8 * MI, "model.init_std": 0.02,
    },
    "olmo2_7b_jupiter": OLMO | {
        "data.tokens": 4 * T, "data.seq_len": 4096, "data.batch_tokens": 4 * MI, "optim.lr": 3e-4, "optim.warmup": 2000 * 4 * MI,
    },
    "olmo3_7b_jupiter": OLMO | {
        "nodes": 128, "data.tokens": 5_930 * B, "data.seq_len": 8192, "data.batch_tokens": 4 * MI, "optim.lr": 3e-4, "optim.warmup": 2000 * 4 * MI,
    },
    "olmo3_32b_jupiter": OLMO | {
        "nodes": 256, "data.tokens": 5_500 * B, "data.seq_len": 8192, "data.batch_tokens": 8 * MI, "optim.lr": 6e-4, "optim.warmup": 2000 * 8 * MI,
    },
    "smollm3_3b_marenostrum5": ADAMW | {
        "nodes": 96, "data.tokens": 4_720_000 * 2_359_296, "data.seq_len": 4096, "data.batch_tokens": 2_359_296, "data.mask_documents": True,
        "optim.lr": 2e-4, "optim.min_lr_ratio": 0.0, "optim.schedule": "wsd", "optim.decay": (4_720_000 - 4_198_000) * 2_359_296,
        "optim.warmup": 2000 * 2_359_296, "optim.eps": 1e-8, "train.z_loss": 0.0, "model.init_std": 0.02,
    },
    "luciole_1b_jupiter": LUCIOLE,
    "luciole_8b_jupiter": LUCIOLE,
    "luciole_23b_jupiter": LUCIOLE,
    "lucie_7b_jupiter": ADAMW | {
        "nodes": 128, "data.tokens": 3_100 * B, "data.seq_len": 4096, "data.batch_tokens": MI,
        "data.batch_ramp": [(round(10_000_000 * n / 12) * 4096, MI + n * 64 * 4096) for n in range(1, 13)],
        "optim.lr": 3e-4, "optim.min_lr_ratio": 0.1, "optim.schedule": "cosine", "optim.warmup": 2_000_000 * 4096, "optim.eps": 1e-5,
        "model.init_std": 0.009,
    },
    "eurollm_9b_marenostrum5": {"nodes": 100, "data.tokens": 4 * T, "data.seq_len": 4096, "data.batch_tokens": 2800 * 4096},
    "eurollm_22b_marenostrum5": {"nodes": 100, "data.tokens": 4 * T, "optim.schedule": "wsd", "optim.decay_shape": "linear", "optim.decay": 400 * B},
    "salamandra_2b_marenostrum5": ADAMW | {
        "nodes": 64, "data.tokens": 12_650 * B, "data.seq_len": 8192, "data.batch_tokens": 4 * MI, "data.mask_documents": True, "optim.lr": 2e-4,
        "optim.min_lr_ratio": 0.1, "optim.schedule": "cosine", "optim.warmup": 2000 * 4 * MI, "model.init_std": 0.014,
    },
    "salamandra_7b_marenostrum5": ADAMW | {
        "data.tokens": 12_650 * B, "data.seq_len": 8192, "data.batch_tokens": 4 * MI, "data.mask_documents": True, "optim.lr": 3e-4,
        "optim.min_lr_ratio": 0.1, "optim.schedule": "cosine", "optim.warmup": 2000 * 4 * MI, "model.init_std": 0.02,
    },
    "salamandra_40b_marenostrum5": {"data.tokens": 9_370 * B, "data.seq_len": 4096},
    "tildeopen_30b_lumi": {"nodes": 192, "data.tokens": 2_100 * B, "data.seq_len": 8192, "data.batch_tokens": 4_718_592, "optim.schedule": "wsd"},
    "poro2_8b_lumi": {
        "data.tokens": 165 * B, "data.seq_len": 8192, "data.batch_tokens": 4 * MI, "optim.lr": 3e-4, "optim.min_lr_ratio": 3.3333333333333335e-5,
        "optim.schedule": "cosine", "optim.warmup": 165 * B // 20, "optim.weight_decay": 0.1,
    },
    "viking_7b_lumi": ADAMW | {
        "nodes": 64, "data.tokens": 2 * T, "data.seq_len": 4096, "data.batch_tokens": 4 * MI, "optim.lr": 3e-4, "optim.min_lr_ratio": 0.1,
        "optim.schedule": "cosine", "optim.warmup": 2000 * 4 * MI, "optim.eps": 1e-5, "model.init_std": 0.0048,
    },
    "nemotron3_nano_jupiter": {"data.seq_len": 8192, "data.batch_tokens": 3072 * 8192},
    # From memory of the report: constant to 10T tokens, then a cosine to a tenth.
    "deepseek_v3_jupiter": {
        "data.tokens": 14_800 * B, "data.batch_tokens": 3072 * 4096, "optim.lr": 2.2e-4, "optim.min_lr_ratio": 0.1, "optim.schedule": "wsd",
        "optim.decay_shape": "cosine", "optim.decay": 4_800 * B,
    },
}  # fmt: skip
# Published shapes that leave a value of [model] open.
ASSUMED = {
    "apertus_8b_jupiter": {"vocab", "qk_norm"}, "apertus_70b_jupiter": {"vocab", "qk_norm"}, "openeurollm_9b_leonardo": {"vocab"},
    "olmo2_7b_jupiter": {"vocab", "init_std"}, "olmo3_7b_jupiter": {"vocab", "init_std"}, "olmo3_32b_jupiter": {"vocab", "init_std"},
    "llama31_8b_jupiter": {"layers", "width", "ffn", "heads", "kv_heads", "vocab", "tied", "rope_theta", "rope_scaling"},
    "deepseek_v2_lite_jupiter": {"rope_theta", "rope_scaling", "init_std"}, "luciole_23b_jupiter": {"rope_fraction"},
    "qwen3_600m_jupiter": {"rope_theta"}, "qwen3_8b_jupiter": {"rope_theta"}, "qwen3_30b_a3b_jupiter": {"rope_theta"},
    "qwen3_235b_a22b_jupiter": {"rope_theta"}, "nemotron3_nano_jupiter": {"init_std"}, "nemotron_h_8b_jupiter": {"init_std"},
    "gptnl_8b_snellius": {"vocab", "tied"}, "gptnl_30b_snellius": {"vocab", "tied"}, "salamandra_40b_marenostrum5": {"rope_theta"},
}  # fmt: skip
# Words of "not yet expressible" and the key that says it.
EXPRESSIBLE = {
    "position reset": "data.reset_positions", "expert parallelism": "layout.expert", "batch ramp": "data.batch_ramp",
    "goldfish": "train.goldfish_k", "ademamix": "optim.name", "decay shape": "optim.decay_shape", "z-loss": "train.z_loss",
}  # fmt: skip


def value(recipe, key):
    for name in key.split("."):
        recipe = getattr(recipe, name)
    return [tuple(step) for step in recipe] if key == "data.batch_ramp" else recipe


@pytest.mark.parametrize("name", PUBLISHED)
def test_training_values_are_the_published_ones(name):
    recipe = load_recipe(FOLDER / f"{name}.toml").recipe
    other = {key: ours for key in PUBLISHED[name] if (ours := value(recipe, key)) != PUBLISHED[name][key]}
    assert other == {}


@pytest.mark.parametrize("name", ASSUMED)
def test_what_was_not_published_is_marked(name):
    assert ASSUMED[name] <= set(load_recipe(FOLDER / f"{name}.toml").recipe.model.assumed)


def test_nothing_expressible_is_called_inexpressible():
    comments = {
        path.stem: " ".join(re.findall(r"^# not yet expressible: (.*)$", path.read_text(), re.M))
        for path in FOLDER.glob("*.toml")
    }
    assert [(name, words) for name, text in comments.items() for words in EXPRESSIBLE if words in text.lower()] == []
