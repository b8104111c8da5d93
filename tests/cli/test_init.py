"""`windlass init`: what it writes loads and plans at once, says why, and overwrites nothing."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.clusters import cluster_names, load_cluster
from windlass.config import load_recipe
from windlass.config.sources import load_data_file
from windlass.config.starter import batch_tokens, default_name, holds_texts, warmup_tokens
from windlass.errors import WindlassError
from windlass.planner import plan


@pytest.fixture
def go(tmp_path, monkeypatch):
    """`go("--size", "8B", ...)` runs init in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        return CliRunner().invoke(build("init"), ["init", *map(str, words)])

    return run


@pytest.mark.parametrize("cluster", [n for n in cluster_names() if n != "workstation"])
@pytest.mark.parametrize("size", ["1B", "13B"])
def test_what_it_writes_plans_at_once(go, cluster, size):
    done = go("--cluster", cluster, "--size", size, "--account", "P1", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    recipe = load_recipe(said["recipe"]).recipe
    assert (recipe.cluster, recipe.launch.account, recipe.nodes) == (cluster, "P1", said["nodes"])
    best = plan(recipe, load_cluster(cluster), top=1).best
    assert best.days == pytest.approx(said["plan"]["days"])
    assert best.layout.model_dump(mode="json") == said["plan"]["layout"]
    assert said["parameters"] == pytest.approx(float(size[:-1]) * 1e9, rel=0.1)


def test_eight_billion_gets_the_published_shape(go):
    go("a.toml", "--cluster", "lumi-g", "--size", "8B", "--yes")
    model = load_recipe("a.toml").recipe.model
    assert (model.layers, model.width, model.ffn, model.heads, model.kv_heads) == (32, 4096, 14336, 32, 8)


def test_the_fewest_nodes_within_a_month(go):
    said = json.loads(go("--cluster", "lumi-g", "--size", "8B", "--json").stdout)
    assert said["plan"]["days"] <= 30 and "fewest" in said["reasons"]["nodes"]
    half = json.loads(
        go("b.toml", "--cluster", "lumi-g", "--size", "8B", "--nodes", said["nodes"] // 2, "--json").stdout
    )
    assert half["plan"]["days"] > 30 and half["reasons"]["nodes"] == "given"


def test_it_overwrites_nothing(go, tmp_path):
    (tmp_path / "a.toml").write_text("mine")
    done = go("a.toml", "--yes")
    assert isinstance(done.exception, WindlassError) and "already there" in done.exception.message
    assert (tmp_path / "a.toml").read_text() == "mine"


def test_it_does_not_overwrite_the_data_file_either(go, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "a-data.toml").write_text("mine")
    done = go("a.toml", "--data", "texts", "--yes")
    assert "a-data.toml is already there" in done.exception.message
    assert not (tmp_path / "a.toml").exists()


@pytest.mark.parametrize(
    "words, part",
    [
        (("a.yaml",), "is no recipe's name"),
        (("--size", "1M"), "outside what init can shape"),
        (("--cluster", "lumy"), "unknown cluster 'lumy'"),
        (("--size", "8B", "--cluster", "workstation"), "fits nowhere"),
        (("--size", "70B", "--cluster", "lumi-g", "--nodes", "1"), "fits nowhere"),
    ],
)
def test_refusals_say_why_and_write_nothing(go, tmp_path, words, part):
    done = go(*words, "--yes")
    assert isinstance(done.exception, WindlassError), done.output
    assert part in done.exception.message and done.exception.hint
    assert not list(tmp_path.glob("*.toml"))


def test_texts_become_a_data_file_and_the_steps_to_tokens(go, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "a"}\n')
    said = json.loads(go("mine.toml", "--data", "texts", "--json").stdout)
    data = load_data_file(said["data_file"])
    assert data.output == load_recipe("mine.toml").recipe.data.store == "data/mine"
    assert data.sources["mine"].paths == ["texts"]
    assert [s.split()[1] for s in said["next"]] == ["plan", "tokenizer", "tokenize", "train"]


def test_questions_are_asked_of_a_person(go, monkeypatch):
    monkeypatch.setattr("windlass.cli.init._ask", lambda question, default: answers.pop(0))
    from windlass.cli import init

    answers = ["leonardo", "leonardo-booster", "EUHPC_A01", "huge", "3B", ""]
    cluster, how = init._machine(None, True)
    assert (cluster.name, how) == ("leonardo-booster", "answered")
    assert init._account(None, cluster, True) == "EUHPC_A01"
    assert init._size(None, cluster, True) == 3e9
    assert init._data(None, True) is None and not answers


def test_batch_is_whole_on_every_device():
    assert batch_tokens(8e9, 4096, 80) == 13 * 80 * 4096  # 4Mi is 12.8 sequences a device
    assert batch_tokens(1e8, 1024, 2) == 2**19
    assert batch_tokens(1e9, 4096, 4096) == 4096 * 4096  # never less than one sequence a device


def test_small_sums():
    assert warmup_tokens(450_000_000_000) == 2_000_000_000
    assert warmup_tokens(160_000_000) == 1_600_000
    assert default_name(1.5e9, "lumi-g") == "llm-1p5b-lumi-g"


def test_a_store_is_not_taken_for_texts(tmp_path):
    (tmp_path / "files.jsonl").write_text("{}")
    assert holds_texts(str(tmp_path))
    (tmp_path / "manifest.json").write_text("{}")
    assert not holds_texts(str(tmp_path))
    assert holds_texts("raw/*.jsonl.zst") and not holds_texts("data/none")


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
    said = json.loads(done.stdout)
    assert load_recipe(file).recipe.name == said["name"] == name
    assert shlex.split(said["next"][0]) == ["windlass", "plan", file]


@pytest.mark.parametrize(
    "words, part",
    [
        (("--tokens", "0"), "nothing to train on"),
        (("--size", "8X"), "'8X' is not a number of parameters"),
        (("--size", "-3B"), "'-3B' is not a number of parameters"),
        (("--size", "5T"), "20M to 1T"),
    ],
)
def test_odd_answers_are_refused_in_the_words_of_the_question(go, tmp_path, words, part):
    done = go("a.toml", "--yes", *words)
    assert isinstance(done.exception, WindlassError) and part in done.exception.message
    assert "tiny_cpu" not in (done.exception.hint or "")
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_still_to_come_is_named_in_the_next_step(go):
    steps = json.loads(go("a.toml", "--cluster", "workstation", "--data", "data/later", "--json").stdout)["next"]
    assert any('output = "data/later"' in step for step in steps)
