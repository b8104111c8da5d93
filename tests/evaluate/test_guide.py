"""The example of docs/guides/generation-tasks.md runs as it stands there."""

import json
import re
from pathlib import Path

import pytest
from tests.evaluate.test_cli import call

from windlass.evaluate.text_metrics import languages
from windlass.files import read_json_lines
from windlass.runs.folder import Run

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "generation-tasks.md"


def test_generation_tasks(llama_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.read_text()
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/my-run").symlink_to(llama_run.path)
    files = re.findall(r'```json title="(\w+\.jsonl)"\n(.*?)```', text, re.S)
    for name, content in files:
        Path(name).write_text(content)
    joined = text.replace("\\\n", " ")
    first, second = re.findall(r"^windlass (eval runs/my-run .*)$", joined, re.M)
    table = call(*first.split(), "--no-save")
    assert "exact_match" in table and "checks_followed" in table and "By language" in table
    scores = json.loads(call(*second.split(), "--no-save"))["scores"]
    assert [score["metric"] for score in scores] == ["pass@1", "pass@2"] and len(files) == 3
    kept = list(read_json_lines(tmp_path / "answers.jsonl"))
    assert [(row["task"], row["item"]) for row in kept[:3]] == [("questions", 1), ("questions", 2), ("instructions", 1)]
    assert kept[0]["prompt"].endswith("Antwoord:") and len(kept[0]["answers"]) == 1 and len(kept) == 5
    assert f"for {len(languages())} languages" in text
