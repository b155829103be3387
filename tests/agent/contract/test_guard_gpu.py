"""The guard where the batch is fetched on the CPU and the loop moves it to a CUDA device. A device-side assert would end the whole process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from guard_loop import Loop
from guard_zoo import FAMILIES

from torch_watchdog_agent.arriving import Copies, Newest
from torch_watchdog_agent.contract.flatten import leaves_of, replaced
from torch_watchdog_agent.rescue.device import DeviceGate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FAMILIES_ON_GPU = [
    *("bert_classifier", "bart", "layoutlmv3", "layoutlm", "roberta", "gpt2", "gpt2_classifier", "llama", "t5"),
    *("two_towers", "segmentation", "columns_and_active_labels", "bags", "binned"),
]


def moved(batch: Any) -> Any:
    return replaced(batch, {key: tensor.cuda(non_blocking=True) for key, tensor in leaves_of(batch).items()})


def on_gpu(name: str) -> tuple[Any, Loop]:
    torch.manual_seed(0)
    random.seed(0)
    family = FAMILIES[name]()
    return family, Loop(family.model.cuda(), lambda model, batch: family.step(model, moved(batch)))


@pytest.mark.parametrize("name", FAMILIES_ON_GPU)
def test_clean_batches_raise_no_alarm_and_bad_ones_never_reach_the_device(name: str) -> None:
    family, loop = on_gpu(name)
    seen = [loop.step(family.clean(), go_on=False) for _ in range(40)]
    assert loop.said == []
    assert [one.violation for one in seen if one.violation is not None] == []
    for bad in family.bad:
        found = loop.step(bad.change(family.clean()))
        assert found.violation is not None, (name, bad.key)
        assert found.violation.batch.key == bad.key, found.violation.summary
    torch.cuda.synchronize()  # raises if an assert fired after all


@pytest.mark.parametrize("name", ["gpt2", "two_towers"])
def test_a_bad_first_batch_is_refused_before_the_kernel_is_launched(name: str) -> None:
    family, loop = on_gpu(name)
    found = loop.step(family.bad[0].change(family.clean()))
    assert found.refused is not None
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["gpt2", "two_towers", "ctc"])
def test_a_default_device_changes_nothing(name: str) -> None:
    """Of the whole script, by torch.set_default_device: tensors that name no device are made there."""
    family, loop = on_gpu(name)
    batches = [family.clean() for _ in range(12)]
    spoiled = [(bad, bad.change(family.clean())) for bad in family.bad]
    with torch.device("cuda"):
        seen = [loop.step(batch, go_on=False) for batch in batches]
        assert loop.said == []
        assert [one.violation for one in seen if one.violation is not None] == []
        for bad, batch in spoiled:
            found = loop.step(batch)
            assert found.violation is not None, (name, bad.key)
            assert found.violation.batch.key == bad.key, found.violation.summary
        copies, newest = Copies(2), Newest()
        assert DeviceGate(torch.device("cuda", 0)) is not None and copies.start(torch.ones(())) is not None
        newest.put(torch.ones(()))
    torch.cuda.synchronize()
