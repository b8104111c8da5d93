"""The score of the power model on published energy."""

from __future__ import annotations

import pytest
from benchmarks.published.energy import fit_constants, predict_watts, read_energy_rows, read_runs, score_energy

from windlass.cost.power import POWER
from windlass.errors import ConfigError

LUCIOLE = {
    "id": "luciole-1b", "source": "Luciole", "model": "Luciole 1B", "params_b": "1.3", "layers": "24", "hidden": "2048",
    "seq_len": "4096", "gpu": "h100-80", "gpus": "128-256", "node_gpus": "4", "mfu_pct": "34.6", "gpu_hours": "41962.1",
    "energy_gpu_mwh": "22.908", "energy_node_mwh": "28.1047", "scope": "gpu+node", "method": "measured: SLURM",
}  # fmt: skip
"""OpenLLM-France/Luciole-Training, pretrain/chronicles/consumption.csv."""
OLMO = {
    "id": "olmo3-7b", "source": "Ai2", "model": "Olmo 3 7B", "params_b": "7.3", "layers": "32", "hidden": "4096", "seq_len": "8192",
    "gpu": "h100-80", "node_gpus": "8", "mfu_pct": "44.1", "gpu_hours": "234000", "energy_gpu_mwh": "146", "scope": "gpu",
    "method": "measured: GPU power",
}  # fmt: skip
MODELLED = {**OLMO, "id": "llama", "source": "Meta", "energy_gpu_mwh": "163.8", "method": "modelled: hours x 700 W"}


def test_every_scope_is_compared_with_itself():
    rows = score_energy([LUCIOLE, OLMO])["rows"]
    assert [(row["id"], row["scope"]) for row in rows] == [
        ("luciole-1b", "gpu"),
        ("luciole-1b", "node"),
        ("olmo3-7b", "gpu"),
    ]
    gpu, node = rows[:2]
    assert gpu["published_watts"] == pytest.approx(545.9, abs=0.1) and node["published_watts"] == pytest.approx(
        669.8, abs=0.1
    )
    assert node["predicted_watts"] - gpu["predicted_watts"] == pytest.approx(POWER.host_small)
    assert gpu["published_mwh"] == pytest.approx(22.908) and all(abs(row["error_pct"]) < 10 for row in rows)


def test_modelled_rows_are_shown_but_neither_scored_nor_fitted_to():
    with_it, without = score_energy([LUCIOLE, OLMO, MODELLED]), score_energy([LUCIOLE, OLMO])
    assert with_it["groups"]["measured"] == without["groups"]["measured"]
    assert with_it["fitted_to_these_rows"] == without["fitted_to_these_rows"]
    assert with_it["groups"]["modelled by their authors, not scored"]["covered"] == 1


def test_a_source_is_left_out_of_its_own_fit():
    with_it = fit_constants([*read_runs(LUCIOLE), *read_runs(OLMO)])
    without = fit_constants(read_runs(OLMO))
    # 28.1047 - 22.908 MWh in 41,962 device-hours; without Luciole no row shows the host of a small node.
    assert with_it.host_small == pytest.approx(123.84, abs=0.01) and without.host_small == 115.0
    assert with_it.waiting == without.waiting == 0.07  # our own measurement, whatever the rows
    node = score_energy([LUCIOLE, OLMO])["rows"][1]
    alone = score_energy([LUCIOLE])["rows"][1]
    assert node["left_out_error_pct"] == pytest.approx(
        predict_watts(read_runs(LUCIOLE)[1], without) / 669.765 * 100 - 100, abs=0.01
    )
    assert node["error_pct"] == alone["error_pct"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "tpu-v3"}, "unknown device"),
        ({"mfu_pct": ""}, "MFU not stated"),
        ({"mfu_pct": "140"}, "mfu_pct '140'"),
        ({"mfu_pct": "35-40"}, "mfu_pct '35-40'"),
        ({"gpu_hours": "-234000"}, "gpu_hours"),
        ({"gpu_hours": "234"}, "6.239e+05 W"),  # 146 MWh in 234 device-hours: 624 kW per device
        ({"gpu_hours": "234000000"}, "0.6239 W"),
        ({"node_gpus": "0"}, "node_gpus"),
        ({"pue": "0.9"}, "pue"),
        ({"params_b": "0.0001"}, "params_b"),
        ({"params_b": "73"}, "contradicts"),
        ({"layers": "320"}, "contradicts"),
        ({"layers": "1e308"}, "layers"),
        ({"active_params_b": "1.3"}, "experts"),
        ({"scope": "rack"}, "rack"),
        ({"gpu_hours": "", "watts_per_gpu": ""}, "no energy published"),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(change, reason):
    result = score_energy([{**OLMO, **change}])
    assert reason in result["rows"][0]["refused"] and result["rows"][0]["error_pct"] is None
    assert result["groups"]["measured"]["covered"] == 0


def test_a_table_without_the_columns_is_refused(tmp_path):
    path = tmp_path / "energy.csv"
    path.write_text("id,gpu\na,h100\n")
    with pytest.raises(ConfigError) as error:
        read_energy_rows(path)
    assert error.value.code == "published.column-missing"


def test_a_table_is_read_as_that_of_speeds(tmp_path):
    """Capitals and spaces in names of columns, semicolons, and decimal commas with them."""
    path, comma = tmp_path / "energy.csv", {**OLMO, "energy_gpu_mwh": "146,0"}
    lines = [";".join(name.upper().replace("_", " ") for name in OLMO), ";".join(comma.values())]
    path.write_text("\r\n".join(lines), encoding="utf-8-sig")
    assert score_energy(read_energy_rows(path)) == score_energy([{**OLMO, "energy_gpu_mwh": "146.0"}])
