"""Which cores a mask names, which ranks share cores, and where the masks of a command or script stand."""

import pytest

from windlass.clusters import load_cluster
from windlass.clusters.load import nearest_masks
from windlass.clusters.masks import (
    cores_of_list,
    cores_of_mask,
    find_bindings,
    lint_entries,
    lint_masks,
    print_cores,
)

LUMI = load_cluster("lumi-g").binding.masks


def test_masks_and_lists_as_cores():
    assert cores_of_mask("0xfe00") == set(range(9, 16))
    assert cores_of_list("1-3,8") == {1, 2, 3, 8}
    assert print_cores({8, 1, 3, 2}) == "1-3,8" and print_cores([]) == ""


def test_the_published_lumi_masks_are_caught():
    """A talk's list repeats its first mask: ranks 0 and 1 share cores 49 to 55."""
    cluster = load_cluster("lumi-g")
    assert list(lint_masks(cluster, cluster.binding.masks)) == []
    [fault] = lint_masks(cluster, ["0xfe000000000000", "0xfe000000000000", *LUMI[2:]])
    assert "ranks 0 and 1 " in fault and " 49-55 " in fault and fault.count("0xfe000000000000") == 2


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({4: "0xff"}, ["rank 4", "reserved cores 0"]),
        ({4: "0x7e00"}, ["ranks 4 and 5", "9-14"]),
        ({0: "0xfe0000", 2: "0xfe000000000000"}, ["rank 0", "NUMA domain 3", "48-63"]),
        ({0: "0x1000000000000000000"}, ["72", "has 64"]),
        ({3: "0x0"}, ["rank 3", "no core"]),
        ({3: "0xfeg"}, ["entry 3", "0xfeg"]),
    ],
)
def test_one_broken_mask_is_named_with_its_cores(change, parts):
    cluster = load_cluster("lumi-g")
    faults = list(lint_masks(cluster, [change.get(i, m) for i, m in enumerate(LUMI)]))
    assert any(all(part in fault for part in parts) for fault in faults), faults


def test_too_few_masks_start_over():
    assert "7 CPU masks for 8 devices" in list(lint_masks(load_cluster("lumi-g"), LUMI[:7]))
    [fault] = lint_entries(LUMI[:7], tasks=8)
    assert "ranks 0 and 7" in fault and "7 entries for 8 tasks" in fault
    assert not list(lint_entries(LUMI, tasks=2))


def test_core_numbers_can_collide_too():
    assert "ranks 1 and 2 " in next(lint_entries(["0", "8", "8"], kind="map_cpu"))


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ('M="0xf,0xf0"; srun --cpu-bind=mask_cpu:$M python x.py', ("0xf", "0xf0")),
        ("export M=0xf,0xf0\nsrun --cpu-bind=v,mask_cpu:${M} x", ("0xf", "0xf0")),
        ("#SBATCH --x\nexport SLURM_CPU_BIND=quiet,mask_cpu:f,f0   # from the recipe", ("f", "f0")),
        ("srun '--cpu-bind=mask_cpu:0xf*2,0xf0' x", ("0xf", "0xf", "0xf0")),
        ("srun --cpu-bind=map_cpu:0,8 x", ("0", "8")),
    ],
)
def test_bindings_in_shell_text(text, entries):
    [binding] = find_bindings(text)
    assert binding.entries == entries


@pytest.mark.parametrize("text", ["srun --cpu-bind=mask_cpu:$UNKNOWN x", "srun --cpu-bind=cores x", "echo mask"])
def test_what_only_the_shell_knows_is_left_alone(text):
    assert find_bindings(text) == []


def test_the_nearest_cluster_offers_its_masks():
    assert nearest_masks([LUMI[0], LUMI[0], *LUMI[2:]]) == ("lumi-g", LUMI)
    assert nearest_masks(["0x1", "0x1"]) is None
