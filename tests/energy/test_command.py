"""`windlass energy --mwh`: tonnes of an energy that was published or measured elsewhere."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from windlass.cli import build
from windlass.errors import WindlassError


def ask(*argv):
    done = CliRunner().invoke(build("energy"), ["energy", *argv, "--json"])
    if isinstance(done.exception, WindlassError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("mwh", "pue", "grid", "tonnes"),
    [(1066, 1.08, 330, 380), (433, 1.2, 57, 30), (324, 1.1, 231, 82), (77, 1.12, 545, 47), (33, 1.1, 385, 14), (74, 1.1, 385, 31), (135, 1.1, 0, 0)],
    ids=["Gopher", "BLOOM", "OPT", "T5", "LLaMA", "LLaMA2", "OLMo"],
)  # fmt: skip
def test_the_olmo_papers_table_without_a_run(mwh, pue, grid, tonnes):
    document = ask("--mwh", str(mwh), "--pue", str(pue), "--grid", str(grid), "--scope", "gpu")
    assert round(document["tco2e"]) == tonnes and document["scope"] == "gpu"
    assert document["mwh_with_pue"] == pytest.approx(mwh * pue)


def test_gptnls_14_tonnes_34_days_and_40000_km():
    document = ask("--mwh", "52.3", "--cluster", "snellius-h100", "--pue", "1", "--days", "34", "--nodes", "22")
    assert document["tco2e"] == pytest.approx(14.0, abs=0.01) and document["scope"] == "node"
    assert document["node_hours"] == 17_952 and document["watts_per_node"] == pytest.approx(2913, abs=1)
    assert "39,987 km by car (350 g CO2e per km" in document["co2_equivalent"]
    assert ask("--mwh", "1", "--node-hours", "528", "--nodes", "22")["days"] == pytest.approx(1.0)


def test_unknown_factors_stay_unknown():
    document = ask("--mwh", "1")
    assert document["tco2e"] is document["mwh_with_pue"] is document["sources"]["grid"] is None
    facility = ask("--mwh", "1", "--scope", "facility", "--grid", "100")
    assert facility["tco2e"] == pytest.approx(0.1) and facility["pue"] is None


@pytest.mark.parametrize(
    ("argv", "code", "number"),
    [
        ((), "energy.run-or-mwh", ""),
        (("some-run", "--mwh", "1"), "energy.run-or-mwh", "some-run"),
        (("--mwh", "1", "--scope", "rack"), "energy.scope-unknown", "rack"),
        (("--mwh", "1", "--scope", "facility", "--pue", "1.1"), "energy.pue-counted-twice", "1.1"),
        (("--mwh", "inf"), "energy.not-a-number", "inf"),
        (("--mwh", "52.3", "--days", "0", "--nodes", "22"), "energy.no-time", "52.3"),
        # GPT-NL's 34 days on 22 nodes are 17,952 node-hours.
        (("--mwh", "1", "--days", "34", "--nodes", "22", "--node-hours", "816"), "energy.hours-contradict", "17,952"),
    ],
)
def test_contradictions_are_refused(argv, code, number):
    with pytest.raises(WindlassError) as error:
        ask(*argv)
    assert error.value.code == code and number in error.value.message
