"""A recipe file plus key=value words becomes a checked recipe, or one message that lists every problem."""

import json

import pytest

from windlass.config import Recipe, load_recipe, recipe_hash
from windlass.config.load import parse_override
from windlass.config.recipe import recipe_schema
from windlass.config.save import parse_interval
from windlass.errors import ConfigError

GOOD = """
name = "tiny"
[model]
layers = 2
width = 64
ffn = 128
heads = 4
vocab = 256
[data]
tokens = "1M"
seq_len = 64
batch_tokens = 512
"""


@pytest.fixture
def recipe_file(tmp_path):
    def write(text=GOOD, name="tiny.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def problems(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return caught.value


def test_a_good_recipe_loads_with_defaults_and_units(recipe_file):
    loaded = load_recipe(recipe_file())
    assert loaded.recipe.data.tokens == 1_000_000
    assert loaded.recipe.layout is None
    assert loaded.recipe.optim.lr == 3e-4


def test_overrides_win_and_are_marked(recipe_file):
    loaded = load_recipe(
        recipe_file(),
        ["layout.micro_batch=4", "optim.lr=1e-3", "data.tokens=2B", 'train.precision="fp32"', "cluster=lumi-g"],
    )
    origins = {key: (value, origin) for key, value, origin in loaded.values()}
    assert origins["layout.micro_batch"] == (4, "override")
    assert origins["optim.lr"] == (1e-3, "override")
    assert origins["data.tokens"] == (2_000_000_000, "override")
    assert origins["cluster"] == ("lumi-g", "override")
    assert origins["model.width"] == (64, "recipe")
    assert origins["optim.beta1"] == (0.9, "default")


def test_all_problems_come_at_once_with_their_paths(recipe_file):
    error = problems(
        recipe_file(
            'name = "a b"\nfoo = 1\n[model]\nlayerz = 2\nwidth = -1\n[data]\ntokens = "45Q"\nseq_len = "long"\n'
        )
    )
    for part in (
        "name:",
        "foo: unknown key",
        "model.layerz: unknown key; did you mean layers?",
        "model.width:",
        "data.tokens: '45Q': unknown unit",
        "data.seq_len:",
    ):
        assert part in error.message, part


def test_rules_over_several_keys(recipe_file):
    error = problems(
        recipe_file(GOOD.replace("heads = 4", "heads = 5").replace("batch_tokens = 512", "batch_tokens = 500"))
    )
    assert "model.heads (5) does not divide model.width (64)" in error.message
    assert (
        "data.batch_tokens (500) is not a multiple of data.seq_len (64); nearest valid value: 448 or 512"
        in error.message
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.heads=4", "model.width=60", "model.kv_heads=2"], "model.heads (4): 15 of the 15 dimensions"),
        (["model.head_dim=9"], "9 of the 9 dimensions"),
        (["model.family=retnet", "model.value_width=50"], "does not divide model.value_width (50); the next larger one is 52"),
        (["model.family=retnet", "model.ffn=90"], "(the default of value_width) (90)"),
        (["model.family=retnet", "model.kv_heads=1"], "model.kv_heads (1): retention has no groups of heads"),
        (["model.family=retnet", "model.head_dim=4"], "model.head_dim (4): retention's heads divide model.width"),
    ],
)  # fmt: skip
def test_shapes_that_no_block_can_have(recipe_file, words, expected):
    assert expected in problems(recipe_file(GOOD), *words).message


def test_tokens_or_steps_are_needed(recipe_file):
    path = recipe_file(GOOD.replace('tokens = "1M"\n', ""))
    assert "data.tokens: missing" in problems(path).message
    assert load_recipe(path, ["train.steps=10"]).recipe.train.steps == 10


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"top_k": 9}, "model.experts.top_k (9) is above model.experts.count (8); at most 8"),
        ({"groups": 3}, "model.experts.groups (3) does not divide model.experts.count (8); the nearest is 2"),
        ({"groups": 4, "groups_kept": 5}, "model.experts.groups_kept (5) is above model.experts.groups (4); at most 4"),
        ({"groups": 8, "groups_kept": 1}, "fewer than model.experts.top_k (2); at least 2"),
        ({"dense_layers": 2}, "model.experts.dense_layers (2) leaves none of model.layers (2) with experts; at most 1"),
        ({"shared_ffn": 64}, "model.experts.shared = 1"),
        ({"router": "tanh"}, "model.experts.router"),
        ({"bias_step": 0.001}, 'balance = "loss" moves no bias'),
        ({"expert": 3}, "model.experts.expert: unknown key"),
    ],
    ids=str,
)
def test_experts_that_do_not_fit_are_refused(recipe_file, changes, numbers):
    values = {"count": 8, "top_k": 2, **changes}
    overrides = [f"model.experts.{key}={value}" for key, value in values.items()]
    error = problems(recipe_file(), *overrides)
    assert error.code == "config.invalid" and numbers in error.message


LATENT = ["model.latent.kv_rank=16", "model.latent.nope_dim=8", "model.latent.rope_dim=8", "model.latent.value_dim=8"]


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ([*LATENT, "model.kv_heads=2"], "model.kv_heads (2): latent attention"),
        ([*LATENT, "model.pattern=WF...", "model.window=8"], "model.pattern ('WF...'): latent attention"),
        ([*LATENT, "model.attention_sinks=true"], "model.attention_sinks (True): latent attention"),
        ([*LATENT, "model.latent.rope_dim=7"], "model.latent.rope_dim (7)"),
        (["model.latent.kv_rank=16"], "model.latent.nope_dim: missing"),
        (["data.reset_positions=true"], "data.reset_positions: needs data.mask_documents"),
        (["model.rope_scaling.kind=yarn", "model.rope_scaling.factor=4"], "model.rope_scaling.old_length"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_keys_that_contradict_each_other_are_refused(recipe_file, overrides, numbers):
    error = problems(recipe_file(), *overrides)
    assert error.code == "config.invalid" and numbers in error.message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.tokens=-5", "negative"),
        ("nodes=0", "greater than 0"),
        ("nodes=many", "valid integer"),
        ("optim.lr=-1", "greater than or equal to 0"),
        ("save.every=30 parsecs", "unknown unit"),
        ("save.every=0", "more than 0"),
        ("train.precision=fp7", "precision"),
        ("data.mix.a=-1", "weights must be at least 0"),
        ("model=3", "model"),
        ('model.family=["llama"]', "model.family"),
    ],
)
def test_a_wrong_value_is_named(recipe_file, override, said):
    assert said in problems(recipe_file(), override).message.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "code", "number"),
    [
        ("x = " + "[" * 20_000 + "]" * 20_000, "config.nested-too-deep", "32"),
        ("x = " + "{a = " * 20_000 + "1" + "}" * 20_000, "config.nested-too-deep", "32"),
        ("[a" + ".a" * 20_000 + "]\nx = 1", "config.nested-too-deep", "32"),
        ("x = " + "9" * 5000, "config.number-too-large", "5000 digits"),
        ("x = " + "9" * 400, "config.number-too-large", "1329 bits"),
    ],
    ids=["lists", "inline tables", "dotted table", "5,000 digits", "400 digits"],
)
def test_nesting_and_integers_have_a_limit(recipe_file, text, code, number):
    error = problems(recipe_file(GOOD + text))
    assert error.code == code and number in error.message and len(error.message) < 500
    key, equals, value = text.partition("x = ")
    if not key and equals:
        error = problems(recipe_file(), f"optim.lr={value}")
        assert error.code == code and number in error.message


@pytest.mark.parametrize("value", ["inf", "nan", "-inf", "1e400"])
@pytest.mark.parametrize("key", ["optim.lr", "optim.weight_decay", "model.rope_theta", "data.max_epochs", "data.mix.a"])
def test_numbers_are_finite(recipe_file, key, value):
    error = problems(recipe_file(), f"{key}={value}")
    assert error.code == "config.invalid" and key in error.message


@pytest.mark.parametrize("word", ["micro_batch", "=3", "layout.=3", "layout..x=3"])
def test_a_word_that_is_no_override(word):
    with pytest.raises(ConfigError, match="is not an override"):
        parse_override(word)


def test_a_file_from_windows_is_read(recipe_file):
    path = recipe_file()
    expected = load_recipe(path).recipe
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert load_recipe(path).recipe == expected


def test_a_missing_file_offers_its_neighbours(recipe_file):
    path = recipe_file(name="gptnl_8b.toml")
    error = problems(path.with_name("gptnl_8.toml"))
    assert "there is no file" in error.message
    assert "gptnl_8b.toml" in (error.hint or "")


def test_a_syntax_error_shows_the_line(recipe_file):
    error = problems(recipe_file("name = tiny\n[model]\n"))
    assert "is not valid TOML" in error.message
    assert "name = tiny" in (error.hint or "")


def test_a_folder_and_a_binary_file_are_no_recipe(tmp_path):
    assert "is a folder" in problems(tmp_path).message
    binary = tmp_path / "x.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in problems(binary).message


def test_the_hash_is_of_what_the_run_is_not_of_where_it_runs(recipe_file):
    a = load_recipe(recipe_file()).recipe
    assert recipe_hash(a) == recipe_hash(
        load_recipe(recipe_file(), ["nodes=4", "data.tokens=2M", "layout.shard=full"]).recipe
    )
    assert recipe_hash(a) != recipe_hash(load_recipe(recipe_file(), ["model.layers=3"]).recipe)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (100, ("steps", 100)),
        ("100", ("steps", 100)),
        ("2B tokens", ("tokens", 2e9)),
        ("30m", ("seconds", 1800)),
        ("1k steps", ("steps", 1000)),
    ],
)
def test_intervals(text, expected):
    assert parse_interval(text) == expected


def test_the_schema_lists_every_table():
    made = recipe_schema()
    assert set(Recipe.model_fields) <= set(made["properties"])
    assert json.loads(json.dumps(made)) == made


def test_a_recipe_is_frozen(recipe_file):
    with pytest.raises(Exception, match="frozen"):
        load_recipe(recipe_file()).recipe.nodes = 3
