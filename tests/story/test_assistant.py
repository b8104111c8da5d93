"""The commands of the guide from a base model to an assistant run in order."""

import json
import os

import pytest

from windlass.files import read_json_lines

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("stories")]


def test_a_base_model_becomes_an_assistant(place, stories):
    folder, _ = place
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed = {c: stories.run(c, folder, env) for c in stories.commands(stories.GUIDES / "assistant.md")}
    losses = [line["loss"] for line in read_json_lines(folder / "runs" / "small-chat" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.5
    last = list(read_json_lines(folder / "runs" / "small-prefer" / "metrics.jsonl"))[-1]
    assert last["reward_accuracy"] > 0.7 and last["reward_margin"] > 0
    (answer,) = (json.loads(text) for command, text in printed.items() if "--json" in command)
    assert answer["answer"] and answer["messages"][-1]["role"] == "assistant"
    exported = folder / "hf" / "small-assistant"
    assert "generation" in (exported / "chat_template.jinja").read_text()
