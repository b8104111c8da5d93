"""Are the tables of the RetNet page those of the measured file?"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_says_what_was_measured() -> None:
    place = ROOT / "benchmarks" / "retnet_vs_llama.py"
    spec = importlib.util.spec_from_file_location("retnet_vs_llama", place)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    found = json.loads((ROOT / "benchmarks" / "results" / "retnet_vs_llama.json").read_text())
    page = made.PAGE.read_text(encoding="utf-8")
    assert made.page_with(page, found) == page, "run `python benchmarks/retnet_vs_llama.py --render`"
    assert f"{found['train']['retnet']['tokens_per_second']:,.0f}" in page
