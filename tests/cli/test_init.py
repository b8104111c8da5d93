"""`windlass init`: what it writes loads and plans at once, says why, and overwrites nothing."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.clusters import cluster_names, load_cluster
from windlass.config import load_recipe
from windlass.config.sources import load_data_file
from windlass.config.starter import batch_tokens, default_name, is_text_path, warmup_tokens
from windlass.errors import ConfigError, PlanError, WindlassError
from windlass.planner import plan


@pytest.fixture
def go(tmp_path, monkeypatch):
    """`go("--size", "8B", ...)` runs init in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return CliRunner().invoke(build("init"), ["init", *map(str, arguments)])

    return run


@pytest.mark.parametrize(
    ("cluster", "size"),
    [(name, ("1B", "13B")[i % 2]) for i, name in enumerate(n for n in cluster_names() if n != "workstation")],
)
def test_what_it_writes_plans_at_once(go, cluster, size):
    done = go("--cluster", cluster, "--size", size, "--account", "P1", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    recipe = load_recipe(result["recipe"]).recipe
    assert (recipe.cluster, recipe.launch.account, recipe.nodes) == (cluster, "P1", result["nodes"])
    best = plan(recipe, load_cluster(cluster), top=1).best
    assert best.days == pytest.approx(result["plan"]["days"])
    assert best.layout.config().model_dump(mode="json") == result["plan"]["layout"]
    assert result["parameters"] == pytest.approx(float(size[:-1]) * 1e9, rel=0.1)


def test_eight_billion_gets_the_published_shape(go):
    go("a.toml", "--cluster", "lumi-g", "--size", "8B", "--yes")
    model = load_recipe("a.toml").recipe.model
    assert (model.layers, model.width, model.ffn, model.heads, model.kv_heads) == (32, 4096, 14336, 32, 8)


def test_nodes_are_doubled_until_a_run_takes_at_most_a_month(go):
    result = json.loads(go("--cluster", "lumi-g", "--size", "8B", "--json").stdout)
    assert result["plan"]["days"] <= 30 and "30 days" in result["reasons"]["nodes"]
    half = json.loads(
        go("b.toml", "--cluster", "lumi-g", "--size", "8B", "--nodes", result["nodes"] // 2, "--json").stdout
    )
    assert half["plan"]["days"] > 30 and half["reasons"]["nodes"] == "given"


def test_the_first_layout_is_named_as_in_a_plan(go):
    """On A100 of 40 GB it recomputes: an earlier version left that out."""
    result = json.loads(go("--cluster", "snellius-a100", "--size", "3B", "--json").stdout)
    recipe = load_recipe(result["recipe"]).recipe
    best = plan(recipe, load_cluster("snellius-a100"), top=1).best
    assert best.recompute != "none" and result["first_layout"] == best.candidate.describe()
    assert best.candidate.describe() in go("b.toml", "--cluster", "snellius-a100", "--size", "3B", "--yes").output


def test_it_overwrites_nothing(go, tmp_path):
    (tmp_path / "a.toml").write_text("mine")
    done = go("a.toml", "--yes")
    assert done.exception.code == "init.file-exists"
    assert (tmp_path / "a.toml").read_text() == "mine"


def test_it_does_not_overwrite_the_data_file_either(go, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "a-data.toml").write_text("mine")
    done = go("a.toml", "--data", "texts", "--yes")
    assert (done.exception.code, "a-data.toml" in done.exception.message) == ("init.file-exists", True)
    assert not (tmp_path / "a.toml").exists()


@pytest.mark.parametrize(
    "arguments, kind, detail",
    [
        (("a.yaml",), ConfigError, "init.file-not-toml"),
        (("--size", "1M"), ConfigError, "init.size-out-of-range"),
        (("--cluster", "lumy"), WindlassError, "lumy"),
        (("--size", "8B", "--cluster", "workstation"), PlanError, "workstation"),
        (("--size", "70B", "--cluster", "lumi-g", "--nodes", "1"), PlanError, "lumi-g"),
        (("--tokens", "0"), ConfigError, "init.tokens-not-positive"),
        (("--size", "8X"), ConfigError, "init.size-invalid"),
        (("--size", "-3B"), ConfigError, "init.size-invalid"),
        (("--size", "5T"), ConfigError, "init.size-out-of-range"),
    ],
)
def test_refusals_have_a_reason_and_write_nothing(go, tmp_path, arguments, kind, detail):
    error = go(*arguments, "--yes").exception
    assert isinstance(error, kind)
    assert detail in (error.code if detail.startswith("init.") else error.message)
    assert error.hint and ("tiny_cpu" in error.hint) == ("1M" in arguments)
    assert not list(tmp_path.iterdir())


def test_texts_become_a_data_file_and_the_steps_to_tokens(go, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "a"}\n')
    result = json.loads(go("mine.toml", "--data", "texts", "--json").stdout)
    data = load_data_file(result["data_file"])
    assert data.output == load_recipe("mine.toml").recipe.data.store == "data/mine"
    assert data.sources["mine"].paths == ["texts"]
    assert [s.split()[1] for s in result["next"]] == ["plan", "tokenizer", "tokenize", "train"]


def test_questions_are_asked_of_a_person(go, monkeypatch):
    """Wrong answers are asked again; nothing is asked twice otherwise."""
    answers = ["leonardo", "leonardo-booster", "EUHPC_A01", "huge", "3B", ""]
    monkeypatch.setattr("windlass.cli.init._ask", lambda question, default: answers.pop(0))
    monkeypatch.setattr("windlass.cli.init._is_interactive", lambda: True)
    assert go("a.toml").exit_code == 0 and not answers
    recipe = load_recipe("a.toml").recipe
    assert (recipe.cluster, recipe.launch.account, recipe.data.store) == ("leonardo-booster", "EUHPC_A01", None)
    assert recipe.model.width >= 2048


def test_batch_is_whole_on_every_device():
    assert batch_tokens(8e9, 4096, 80) == 13 * 80 * 4096  # 4Mi is 12.8 sequences a device
    assert batch_tokens(2e7, 1024, 2) == 2**16 and batch_tokens(1e8, 1024, 2) == 2**19
    assert batch_tokens(1e9, 4096, 4096) == 4096 * 4096  # never less than one sequence a device


def test_small_sums():
    assert warmup_tokens(450_000_000_000) == 2_000_000_000
    assert warmup_tokens(160_000_000) == 1_600_000
    assert default_name(1.5e9, "lumi-g") == "llm-1p5b-lumi-g"


def test_a_store_is_not_taken_for_texts(tmp_path):
    (tmp_path / "files.jsonl").write_text("{}")
    assert is_text_path(str(tmp_path))
    (tmp_path / "manifest.json").write_text("{}")
    assert not is_text_path(str(tmp_path))
    assert is_text_path("raw/*.jsonl.zst") and not is_text_path("data/none")


def test_a_hint_names_the_page_on_this_disk():
    from pathlib import Path

    from windlass.cli import with_pages

    shown = with_pages("see docs/guides/data.md, or docs/none.md").split()
    assert Path(shown[1].rstrip(",")).is_file() and Path(shown[1].rstrip(",")).is_absolute()
    assert shown[-1] == "docs/none.md"


@pytest.mark.parametrize(
    "file, name",
    [("my recipe.toml", "my-recipe"), ("größe.toml", "groe"), ("[x].toml", "x"), ("数.toml", "llm-20m-workstation")],
)
def test_odd_file_names_become_plain_run_names(go, file, name):
    done = go(file, "--cluster", "workstation", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert load_recipe(file).recipe.name == result["name"] == name
    assert shlex.split(result["next"][0]) == ["windlass", "plan", file]


def test_a_store_that_is_still_to_come_is_named_in_the_next_step(go):
    steps = json.loads(go("a.toml", "--cluster", "workstation", "--data", "data/later", "--json").stdout)["next"]
    assert any('output = "data/later"' in step for step in steps)
