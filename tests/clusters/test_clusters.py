"""Every machine file loads, every number has a source, and a wrong mask is caught."""

import tomllib
from pathlib import Path

import pytest

import windlass.clusters
from windlass.clusters import cluster_names, device_by_driver_name, devices, find_device, load_cluster, load_device
from windlass.clusters.describe import facts, leaves, source_of
from windlass.clusters.model import Cluster
from windlass.config import validate
from windlass.config.load import apply_override
from windlass.errors import ConfigError

SHIPPED = (
    "jupiter-booster",
    "juwels-booster",
    "leonardo-booster",
    "lumi-g",
    "marenostrum5-acc",
    "snellius-a100",
    "snellius-h100",
    "workstation",
)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "windlass" / "clusters"
    folder.mkdir(parents=True)
    return folder


def unsourced_numbers(table) -> list[str]:
    """Numbers without a source; `per_module` describes the part itself and `efficiency` carries its own origin."""
    numbers = [k for k, v in leaves(table) if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return [
        k for k in numbers if k.split(".")[0] not in ("per_module", "efficiency") and not source_of(k, table.sources)
    ]


def test_the_shipped_machines_are_there():
    assert set(SHIPPED) <= set(cluster_names())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_has_a_source(name):
    cluster = load_cluster(name)
    assert unsourced_numbers(cluster) == []
    assert all(variable.why for variable in cluster.env.values())


@pytest.mark.parametrize("name", sorted(devices()))
def test_every_device_number_has_a_source(name):
    assert unsourced_numbers(load_device(name)) == []


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "workstation"])
def test_settings_of_a_site_have_a_source_too(name):
    cluster = load_cluster(name)
    tables = ("binding", "container", "network", "billing", "energy", "links")
    unsourced = [f.key for f in facts(cluster) if f.key.split(".")[0] in tables and not f.source]
    assert unsourced == []
    latencies = [f.status for f in facts(cluster) if f.key.endswith("latency_us")]
    assert latencies == ["assumed"] * 2  # no site publishes them


def test_unverified_values_stay_visible():
    by_key = {f.key: f for f in facts(load_cluster("marenostrum5-acc"))}
    assert by_key["nodes"].status == "unverified"
    assert by_key["grid.pue"].status == "assumed"


def test_the_nearest_source_wins():
    cluster = load_cluster("lumi-g")
    assert source_of("node.cpu_watts", cluster.sources).status == "unverified"
    assert source_of("node.cores", cluster.sources).status == "documented"


def test_a_user_overrides_one_value(own):
    (own / "lumi-g.toml").write_text("[grid]\npue = 1.04\n")
    cluster = load_cluster("lumi-g")
    assert cluster.grid.pue == 1.04
    assert cluster.grid.g_per_kwh == 79.2


def test_a_user_adds_a_machine(own):
    (own / "attic.toml").write_text('title = "Attic"\ndevice = "h200"\n[node]\ndevices = 1\ncores = 16\n')
    assert "attic" in cluster_names()
    assert load_cluster("attic").node.devices == 1


def test_a_wrong_mask_of_a_user_is_refused(own):
    (own / "lumi-g.toml").write_text(
        '[binding]\nmasks = ["0xfe", "0xfe", "0xfe", "0xfe", "0xfe", "0xfe", "0xfe", "0xfe"]\n'
    )
    with pytest.raises(ConfigError) as error:
        load_cluster("lumi-g")
    assert error.value.code == "clusters.invalid-binding"


def test_an_unknown_machine_or_device_offers_its_neighbours(own):
    with pytest.raises(ConfigError) as error:
        load_cluster("lumi")
    assert error.value.code == "clusters.unknown-cluster" and "lumi-g" in (error.value.hint or "")
    (own / "attic.toml").write_text('title = "Attic"\ndevice = "h2000"\n[node]\ndevices = 1\ncores = 16\n')
    with pytest.raises(ConfigError) as error:
        load_cluster("attic")
    assert error.value.code == "clusters.unknown-device" and "h200" in (error.value.hint or "")
    (own / "attic.toml").write_text('title = "Attic"\ndevice = "h200"\n[nod]\ndevices = 1\n')
    with pytest.raises(ConfigError) as error:
        load_cluster("attic")
    assert "nod:" in error.value.message


@pytest.mark.parametrize(
    ("reported", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80"), ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-SXM-64GB", "a100-64"), ("AMD Instinct MI250X", "mi250x-gcd"), ("NVIDIA GH200 480GB", "gh200"),
     ("NVIDIA H20", "h20"), ("NVIDIA A10G", "a10"), ("NVIDIA L4", "l4"), ("NVIDIA H100 PCIe", "h100-pcie")],
)  # fmt: skip
def test_devices_are_known_by_the_name_the_driver_reports(reported, name):
    assert device_by_driver_name(reported).name == name


@pytest.mark.parametrize("reported", ["NVIDIA GeForce GTX 1080", "NVIDIA A100-XYZ", "NVIDIA H2000", "A100"])
def test_an_unknown_device_gives_none_rather_than_a_guess(reported):
    assert device_by_driver_name(reported) is None


@pytest.mark.parametrize(
    ("words", "name"),
    [("H100-80GB", "h100-80"), ("8xA100 (SXM4, 40G)", "a100-40"), ("A100", "a100-80"), ("H100 SXM5 80 GiB", "h100-80"), ("H100-96GB-500W", "h100-96"),
     ("MI250-GCD-64GB", "mi250x-gcd"), ("GB200-184GB", "gb200"), ("GB300", "gb300"), ("B300", "b300"), ("V100-16GB", "v100-16"), ("RTX4090", "rtx4090"), ("NVIDIA H100 NVL", "h100-nvl"),
     ("NVIDIA A100-SXM-64GB", "a100-64"), ("a100-40", "a100-40"), ("A100-40", "a100-40"), ("h100-nvl", "h100-nvl"), ("H100-SXM5-64", "h100-64"), ("H100 x 64", "h100-80"),
     ("A100-80GB-PCIe", "a100-pcie-80"), ("A100-PCIE-40GB", "a100-pcie-40"), ("MI250X (1 GCD)", "mi250x-gcd")],
)  # fmt: skip
def test_devices_by_the_words_of_tables(words, name):
    assert find_device(words).name == name


@pytest.mark.parametrize("words", ["", "TPU v4", "abacus", "A1000", "h10"])
def test_words_that_mean_no_device(words):
    assert find_device(words) is None


def test_mfu_is_a_share_of_the_quoted_peak_and_time_follows_the_silicon():
    """TOP500: 1,824,768 cores of Leonardo are 3,456 nodes of 32 cores and four parts of 124 multiprocessors; peak 306.31 PFLOP/s (FP64)."""
    part, ordinary = load_device("a100-64"), load_device("a100-80")
    assert 3456 * (32 + 4 * 124) == 1_824_768
    assert part.bf16_tflops == ordinary.bf16_tflops == ordinary.peak_tflops == 312
    assert part.peak_tflops == pytest.approx(16 * 306.31e3 / (3456 * 4), rel=0.005)


def test_bandwidth_of_marenostrums_part_is_bus_times_clock():
    assert load_device("h100-64").bandwidth_gbs == pytest.approx(2 * 1593e6 * 4096 / 8 / 1e9, rel=0.001)


@pytest.mark.parametrize(("arch", "name"), [("sm_90", "hopper"), ("SM90a", "hopper"), ("hopper", "hopper"), ("gfx90a", "cdna2"), ("new", "new")])  # fmt: skip
def test_generations(arch, name):
    assert load_device("h200").model_copy(update={"arch": arch}).generation == name


def test_one_table_of_devices_is_shipped():
    root = Path(windlass.clusters.__file__).parents[1]
    assert [p.relative_to(root).as_posix() for p in root.rglob("devices.toml")] == ["clusters/data/devices.toml"]


@pytest.mark.parametrize(
    "said, meant",
    [("LUMI-G", "lumi-g"), ("leonardo", "leonardo-booster"), ("Snellius", "snellius-h100"), ("mn5", "marenostrum5-acc"), ("juwles", "juwels-booster")],
)  # fmt: skip
def test_a_machine_as_people_say_it_is_recognised(said, meant):
    with pytest.raises(ConfigError) as caught:
        load_cluster(said)
    assert "did you mean" in caught.value.hint and meant in caught.value.hint and "workstation" not in caught.value.hint


def test_a_name_like_none_gets_the_whole_list():
    with pytest.raises(ConfigError) as caught:
        load_cluster("qqqq")
    assert all(name in caught.value.hint for name in cluster_names())


@pytest.mark.parametrize("key, value", [
    ("title", "x\ncanary"), ("modules", ["a;b"]), ("env", {"A B": {"value": "1", "why": "x"}}),
    ("env", {"A": {"value": "1", "why": "x\ncanary"}}), ("network.master_suffix", "$(x)"), ("container.gpu_flag", "x"),
    ("slurm.extra", {"mem": "1\n2"}), ("slurm.srun_extra", ["canary"]), ("energy.ear_flags", ["x"]),
    ("storage.x.path", "/a/$(x)"), ("storage.x.path", "/a/${x:=y}"), ("binding.masks", ["0x1;x"]),
])  # fmt: skip
def test_a_cluster_file_cannot_put_commands_into_a_job_script(key, value):
    raw = tomllib.loads((Path(windlass.clusters.__file__).parent / "data" / "snellius-h100.toml").read_text()) | {
        "name": "x"
    }
    apply_override(raw, key.split("."), value)
    with pytest.raises(ConfigError) as caught:
        validate(Cluster, raw, "x.toml")
    assert caught.value.code == "config.invalid" and key in caught.value.message
