"""The one command that trains, evaluates and decodes RetNet and Llama of one size, at CPU size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)
def test_both_models_train_and_retnet_decodes_in_constant_memory(tmp_path):
    command = [sys.executable, "benchmarks/retnet_vs_llama.py", "--small", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WINDLASS_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "retnet_vs_llama-tiny.json").read_text())
    sizes = {name: row["parameters"] for name, row in results["train"].items()}
    assert sizes["llama"] == pytest.approx(sizes["retnet"], rel=0.02)
    for row in results["train"].values():
        assert row["losses"][-1] < row["losses"][0] - 0.3
    states = {name: [row["state_bytes"] for row in rows] for name, rows in results["decode"].items()}
    contexts = [row["context"] for row in results["decode"]["retnet"]]
    assert contexts == [64, 128, 256]
    # 2 layers x 2 heads x 32 x 64 fp32 numbers, whatever the context.
    assert states["retnet"] == [2 * 2 * 32 * 64 * 4] * 3
    # Keys and values of every position but that of the last token, which is not fed back: 2 x 2 layers x 64 fp32.
    assert states["llama"] == [(context + 4) * 2 * 2 * 64 * 4 for context in contexts]
    assert "| retnet | 256 |" in done.stdout and "| llama | 256 |" in done.stdout
