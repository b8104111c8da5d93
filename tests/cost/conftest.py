import pytest

from windlass.clusters.model import Device, Links
from windlass.config import ModelConfig
from windlass.models.presets import model_spec
from windlass.models.spec import ModelSpec


@pytest.fixture
def h100() -> Device:
    return Device(name="H100", vendor="nvidia", arch="hopper", memory="80 GiB", bf16_tflops=989, fp8_tflops=1979, bandwidth_gbs=3350, tdp_watts=700)  # fmt: skip


@pytest.fixture
def a100() -> Device:
    return Device(name="A100", vendor="nvidia", arch="ampere", memory="80 GiB", bf16_tflops=312, bandwidth_gbs=2039, tdp_watts=400)  # fmt: skip


@pytest.fixture
def links() -> Links:
    return Links(intra_gbs=370, inter_gbs_per_node=400)


@pytest.fixture
def llama_8b() -> ModelSpec:
    return model_spec(ModelConfig(layers=32, width=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256))
