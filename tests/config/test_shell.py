from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.config import Recipe, shell, validate
from windlass.errors import ConfigError

RECIPE = {"name": "x", "model": {"layers": 1, "width": 8, "ffn": 8, "heads": 1, "vocab": 8}}


@pytest.mark.parametrize("text, quoted", [
    ("plain-1.2/x", "plain-1.2/x"),
    ("$HOME/a b", '"$HOME/a b"'),
    ("${SLURM_JOB_ID}$(x)", '"${SLURM_JOB_ID}\\$(x)"'),
    ("${USER:-me}`x`\\", '"${USER:-me}\\`x\\`\\\\"'),
    ("${USER:-$(x)}", "'${USER:-$(x)}'"),
    ("$(x)", "'$(x)'"),
    ("$@", "'$@'"),
    ("", "''"),
])  # fmt: skip
def test_only_variables_are_filled_in(text, quoted):
    assert shell.quote(text, expand=True) == quoted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\n")), min_size=1, max_size=20))
def test_bash_reads_back_what_was_quoted(texts):
    script = "printf '%s\\n' " + " ".join(map(shell.quote, texts))
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True)
    assert done.stdout.decode().split("\n")[:-1] == texts


@pytest.mark.parametrize("key, value", [
    ("account", "p1\ncanary"), ("account", "-p1"), ("partition", "a b"), ("qos", "$(x)"), ("venv", "-x"),
    ("container", "/x$(y).sif"), ("binds", ["/x`y`"]), ("modules", ["gcc; canary"]), ("modules", ["gcc cuda"]),
    ("env", {"A;B": "1"}), ("env", {"A": "1\n2"}), ("env", {"BASH_ENV": "$(x)"}), ("env", {"SLURM_JOB_ID": "a[1]"}),
    ("sbatch", {"mem\nx": "1"}), ("sbatch", {"mem": "1\ncanary"}), ("sbatch", {"mem=1 --wrap": "x"}),
])  # fmt: skip
def test_a_text_of_the_wrong_kind_is_refused_with_its_key(key, value):
    with pytest.raises(ConfigError) as caught:
        validate(Recipe, {**RECIPE, "launch": {key: value}}, "r.toml")
    assert caught.value.code == "config.invalid" and f"launch.{key}" in caught.value.message
    assert caught.value.message.count("\n") == 1  # one problem, on one line
    # A folder of an earlier version stays readable: nothing is submitted from it.
    validate(Recipe, {**RECIPE, "launch": {key: value}}, "config.json", recorded=True)


@pytest.mark.parametrize("key, value", [
    ("account", "project_462000123"), ("partition", "boost_usr_prod,other"), ("venv", "$WORK/my venv"),
    ("binds", ["/a:/b", "${SCRATCH}:/s"]), ("modules", ["PyTorch/2.1.2-foss-2023a-CUDA-12.1.1"]),
    ("env", {"A": "$(kept as it is); `too`", "BASH_ENV": "/etc/x.sh"}), ("sbatch", {"--mail_user": "a@b", "mem": 0}),
    ("sbatch", {"constraint": "[a|b]&c", "export": "ALL,HF_TOKEN"}),
])  # fmt: skip
def test_ordinary_values_pass(key, value):
    assert getattr(validate(Recipe, {**RECIPE, "launch": {key: value}}, "r.toml").launch, key) == value
