"""Which batch a failure is laid to, and which step, where Python is ahead of a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_watchdog_agent.loop import Loop
from torch_watchdog_agent.rescue.gpu import OnGpu
from torch_watchdog_agent.rescue.recent import KEPT, RecentBatches


def batches_of(steps: list[int], *, several: bool) -> RecentBatches:
    here = SimpleNamespace(loop=SimpleNamespace(step=0))
    kept = RecentBatches(here)  # type: ignore[arg-type]
    for number, here.loop.step in enumerate(steps):
        kept.keep({"ids": torch.tensor([number])}, several=several)
    return kept


@pytest.mark.parametrize(
    ("steps", "several", "step", "number"),
    [
        ([7, 8, 9], False, 9, 2),
        ([7, 8, 9], False, 10, 2),  # between two steps
        ([7, 8, 9], False, 8, None),
        ([7, 8, 9], True, 8, 1),
        ([7, 8, 8, 9], True, 8, 2),  # the last of its micro-batches
        (list(range(9)), True, 9 - KEPT, 9 - KEPT),
        (list(range(9)), True, 8 - KEPT, None),
    ],
)
def test_the_batch_of_a_step(steps: list[int], several: bool, step: int, number: int | None) -> None:
    found = batches_of(steps, several=several).of(step)
    assert (found is None) if number is None else found["ids"].item() == number


class Gate:
    """A device that has done two updates."""

    done = 2

    def before_update(self, number: int) -> None: ...
    def after_update(self, number: int) -> None: ...
    def opened(self, number: int) -> None: ...


def test_a_failure_on_a_device_is_laid_to_the_step_that_the_device_was_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_watchdog_agent.rescue import device

    monkeypatch.setattr(device, "of_this_process", lambda parameter, shared: Gate())
    loop, optimizer = Loop(), SimpleNamespace(param_groups=[])
    here: Any = SimpleNamespace(config=SimpleNamespace(device_gate=True), loop=loop, history=SimpleNamespace(device_words=None))
    gpu = OnGpu(here)
    assert gpu.step_of_failure() is None
    for _ in range(5):
        loop.handed_over()
        gpu.opened()
        gpu.before_update(optimizer, first=True)
        loop.at_gate(1)
        loop.gate_done(applied=True)
        gpu.after_update()
    assert loop.updates_applied == 5
    assert gpu.step_of_failure() == 2  # counted from 0
    Gate.done = 77  # as it dies
    assert gpu.step_of_failure() == 4


class Sharded:
    """A parameter of which this rank has a shard. Anything else that is asked of it is a collective."""

    def to_local(self) -> torch.Tensor:
        return torch.ones(3)


def test_a_device_is_asked_for_a_shard_of_its_own_and_never_for_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_watchdog_agent.rescue import device

    asked: list[torch.Tensor] = []
    gate = SimpleNamespace(answers=lambda parameter: asked.append(parameter) is None, before_update=lambda number: None)
    monkeypatch.setattr(device, "of_this_process", lambda parameter, shared: gate)
    optimizer = SimpleNamespace(param_groups=[{"params": [Sharded()]}])
    here: Any = SimpleNamespace(config=SimpleNamespace(device_gate=True), loop=Loop(), history=SimpleNamespace(device_words=None))
    gpu = OnGpu(here)
    state: Any = SimpleNamespace(optimizers=[optimizer])
    assert not gpu.answers(state)
    gpu.before_update(optimizer, first=True)
    assert gpu.answers(state)
    assert torch.equal(asked[0], torch.ones(3))
    assert not gpu.answers(SimpleNamespace(optimizers=[]))  # type: ignore[arg-type]
