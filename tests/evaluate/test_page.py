"""The tables of the RetNet page have the measured numbers."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_page_has_the_measured_numbers() -> None:
    results = json.loads((ROOT / "benchmarks/results/retnet_vs_llama.json").read_text())
    page = (ROOT / "docs/guides/retnet-vs-llama.md").read_text(encoding="utf-8")
    for model in ("retnet", "llama"):
        trained, evaluated = results["train"][model], results["evaluate"][model]
        numbers = [
            f"{trained['parameters'] / 1e6:.1f} M",
            f"{trained['tokens_per_second']:,.0f}",
            f"{evaluated['scores']['all: bits_per_byte'][0]:.3f}",
            f"{evaluated['eval_tokens_per_second']:,.0f}",
            *(f"{1000 * row['token_seconds']:.2f}" for row in results["decode"][model]),
        ]
        assert [number for number in numbers if number not in page] == []
