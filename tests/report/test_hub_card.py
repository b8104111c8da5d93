"""README.md of an export, read by Hugging Face's own reader: what the run states, and nothing else."""

from __future__ import annotations

import json

import pytest

from windlass.report.collect import collect
from windlass.report.write import hub_readme
from windlass.runs.folder import Run


def card(run: Run, library: str = "transformers", **tables) -> tuple[dict, str]:
    config = json.loads(run.config_file.read_text())
    merged = {key: (config.get(key) or {}) | value for key, value in tables.items()}
    run.config_file.write_text(json.dumps(config | merged))
    reader = pytest.importorskip("huggingface_hub")
    text = hub_readme(collect(run), library)
    read = reader.ModelCard(text, ignore_metadata_errors=False)
    return read.data.to_dict(), read.text


def change_sources(run: Run, sources: list[dict]) -> None:
    manifest = json.loads(run.manifest_file.read_text())
    run.manifest_file.write_text(json.dumps(manifest | {"data": {"sources": sources}}))


def test_what_is_stated_stands_in_the_metadata(run):
    change_sources(
        run,
        [
            {"name": "a", "languages": ["nl", "fy"], "origin": "https://huggingface.co/datasets/HPLT/HPLT2.0_cleaned"},
            {"name": "b", "language": "code", "origin": "https://example.org/x"},
            {"name": "c", "languages": "python, Dutch"},
        ],
    )
    data, text = card(run, project={"licence": "Apache-2.0", "base_model": "openGPT-X/Teuken-7B-base"})
    assert data == {
        "license": "apache-2.0", "language": ["code", "fy", "nl"], "base_model": "openGPT-X/Teuken-7B-base",
        "datasets": ["HPLT/HPLT2.0_cleaned"], "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["windlass", "llama"],
    }  # fmt: skip
    assert text.startswith("\n# sample") and "AutoModelForCausalLM.from_pretrained(folder)" in text
    assert "| licence of the weights | Apache-2.0 |" in text and "starts from the weights of openGPT-X" in text


def test_what_is_not_known_is_left_out(run):
    change_sources(run, [{"name": "a"}])
    data, text = card(run)
    assert data == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["windlass", "llama"]}
    assert "| licence of the weights | to be written by the provider |" in text


def test_a_licence_without_a_name_on_the_hub_and_a_family_of_our_own(run):
    data, text = card(run, "windlass", project={"licence": "Licence of our institute, version 2"})
    assert (data["license"], data["license_name"]) == ("other", "Licence of our institute, version 2")
    assert "windlass generate" in text and "from_pretrained" not in text


def test_names_cannot_become_keys_or_markup(run):
    hostile = '"\n---\nlicense: mit\n<script>alert(1)</script>\x1b[2J\u202e'
    change_sources(run, [{"name": hostile, "languages": [hostile], "origin": hostile, "licence": hostile}])
    data, text = card(run, project={"licence": hostile, "base_model": hostile, "title": hostile})
    assert data["license"] == "other" and not {"base_model", "language", "datasets"} & set(data)
    assert "<script>" not in text and not {"\x1b", "\u202e"} & set(text)
