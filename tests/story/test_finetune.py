"""The commands of the guide to fine-tuning run in order: an encoder is pre-trained, exported and fine-tuned."""

import os

import pytest

from windlass.files import read_json_lines

pytestmark = [pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("stories")]


def test_an_encoder_is_made_and_fine_tuned(place, stories):
    folder, _ = place
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    printed = {c: stories.run(c, folder, env) for c in stories.commands(stories.GUIDES / "finetune.md")}
    losses = [line["loss"] for line in read_json_lines(folder / "runs" / "encoder-small" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 1
    verified = [text for command, text in printed.items() if "export" in command]
    assert len(verified) == 2 and all("logits verified" in text for text in verified)
    scores = {
        line["metric"]: line["value"]
        for line in read_json_lines(folder / "runs" / "encoder-small-kpwr_ner-seed0" / "eval.jsonl")
    }
    assert scores["span_f1"] > 0.6
