"""Continued pre-training: a new run that begins from another run's weights, on several processes."""

from __future__ import annotations

import pytest
import torch
from tests.faults import lab as faults
from tests.faults.lab import Lab, start, tensors

pytestmark = [pytest.mark.multi, pytest.mark.xdist_group("faults")]


def test_a_run_begins_from_the_weights_of_another(tmp_path) -> None:
    lab = Lab(tmp_path)
    made = faults.recipe(lab.store, steps=8)
    first = lab.reference(made, 2)
    # A learning rate of nearly nothing: after one step the weights are still the ones it began from.
    still = {"optim": {"lr": 1e-12, "warmup": 0}, "save": {"load": str(first.path)}}
    second = lab.new_run(faults.recipe(lab.store, steps=1, **still), "second")
    assert start(faults.recipe(lab.store, steps=1, **still), second, 2).wait() == [0, 0]
    old, new = tensors(first.checkpoint(8)), tensors(second.checkpoint(1))
    weights = [name for name in old if name.startswith("model.")]
    assert len(weights) > 10 and all(torch.allclose(old[n], new[n], atol=1e-7, rtol=0) for n in weights)
    moments = [name for name in old if name.startswith("optim.")]
    assert any(not torch.allclose(old[n], new[n], atol=1e-7, rtol=0) for n in moments)  # weights only
    assert faults.read_extra(second.checkpoint(1))["extra"]["tokens"] == 128  # counted from the beginning
