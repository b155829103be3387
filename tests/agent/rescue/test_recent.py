"""Which batch a failure is laid to, and which step, where Python is ahead of a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failure_while_the_next_batch_is_made_is_laid_to_that_and_to_no_batch_before(num_workers: int, tmp_path: Path) -> None:
    here: Any = SimpleNamespace(
        loop=Loop(), config=SimpleNamespace(bundles=True, run_dir=str(tmp_path)), identity=SimpleNamespace(attempt=0, rank=1)
    )
    kept = RecentBatches(here)
    kept.keep({"ids": torch.tensor([1])}, several=False)
    with pytest.raises(IndexError) as raised:
        list(DataLoader([torch.tensor(0)], sampler=[0, 7, 8], batch_size=3, num_workers=num_workers))
    kept.not_made(raised.value, [0, 7, 8])
    kept.not_made(raised.value, None)  # the loader around it
    assert kept.fetch_behind(raised.value) == "the batch of samples 0, 7, 8 of the data set"
    assert kept.fetch_behind(ValueError("another")) == ""
    assert kept.write_bundle(0) == ""
    assert kept.write_bundle(0, of_device=True) == "bundles/0-1.safetensors"  # launched before, by a batch that was in hand then
    kept.keep({"ids": torch.tensor([1])}, several=False)
    assert (kept.write_bundle(0), kept.fetch_behind(raised.value)) == ("bundles/0-1.safetensors", "")
    kept.pass_ended()
    assert kept.write_bundle(0) == ""


def test_what_a_sampler_raises_is_laid_to_no_samples() -> None:
    kept = RecentBatches(SimpleNamespace(loop=Loop()))  # type: ignore[arg-type]
    error = ValueError("of the sampler's own")
    kept.not_made(error, [0, 7, 8])
    assert kept.fetch_behind(error) == "a batch"


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
    gate = SimpleNamespace(answers=lambda parameter, within_s: asked.append(parameter) is None, before_update=lambda number: None)
    monkeypatch.setattr(device, "of_this_process", lambda parameter, shared: gate)
    optimizer = SimpleNamespace(param_groups=[{"params": [Sharded()]}])
    here: Any = SimpleNamespace(config=SimpleNamespace(device_gate=True), loop=Loop(), history=SimpleNamespace(device_words=None))
    gpu = OnGpu(here)
    state: Any = SimpleNamespace(optimizers=[optimizer])
    assert not gpu.answers(state, within_s=3.0)
    gpu.before_update(optimizer, first=True)
    assert gpu.answers(state, within_s=3.0)
    assert torch.equal(asked[0], torch.ones(3))
    assert not gpu.answers(SimpleNamespace(optimizers=[]), within_s=3.0)  # type: ignore[arg-type]
