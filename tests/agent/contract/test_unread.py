"""When the answer about a batch that was handed over unread is asked for, and what comes of it. The device is one that answers only when it is waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guard_device_loop import DeviceLoop
from torch import nn
from torch.nn import functional as F  # noqa: N812

from torch_watchdog_agent.errors import BadBatchError
from torch_watchdog_agent.unread import Unread
from torch_watchdog_proto.messages import Violation


def batch(bad: bool = False) -> dict[str, torch.Tensor]:
    made = {"x": torch.randint(0, 50, (4, 6)), "y": torch.randint(0, 5, (4,))}
    if bad:
        made["x"][1, 2] = 50
    return made


class Steps:
    """A loop that has learned its bounds, and its batches that are under check."""

    def __init__(self, *, change: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(48, 5))
        self.loop = DeviceLoop(self.model, lambda model, one: F.cross_entropy(model(one["x"]), one["y"]).backward())
        for _ in range(6):
            self.loop.step(batch(), go_on=False)
        self.loop.waits.clear()
        self.found: list[Violation] = []
        self.unread = Unread(self.loop.guard, say=self.loop.said.append, found=self.found.append, change=change)

    def handed(self, one: Any) -> Any:
        return self.unread.handed_over(one, self.loop.guard.fetched(one, indices=None, worker=None))


def test_a_bad_batch_is_found_when_it_is_asked_for_before_backward() -> None:
    steps = Steps()
    got = steps.handed(batch(bad=True))
    assert int(got["x"].max()) < 50
    assert (steps.found, steps.loop.waits) == ([], [])
    steps.unread.settle(wait=True)
    assert [one.batch.value for one in steps.found] == [50]
    assert not steps.unread


def test_nothing_is_waited_for_between_steps() -> None:
    steps = Steps()
    steps.handed(batch())
    steps.unread.settle(wait=False)
    assert steps.unread
    assert steps.loop.waits == []


def test_all_micro_batches_that_were_taken_first_are_heard() -> None:
    steps = Steps()
    for bad in (False, True, False):
        steps.handed(batch(bad))
    steps.unread.settle(wait=True)
    assert len(steps.found) == 1
    assert len(steps.loop.waits) == 3


def test_where_the_job_is_only_observed_the_loop_gets_its_own_batch() -> None:
    steps = Steps(change=False)
    bad = batch(bad=True)
    assert steps.handed(bad) is bad
    steps.unread.settle(wait=True)
    assert len(steps.found) == 1


def test_what_the_finding_raises_reaches_the_training() -> None:
    steps = Steps()

    def refuse(violation: Violation) -> None:
        raise BadBatchError(violation)

    steps.unread = Unread(steps.loop.guard, say=print, found=refuse, change=True)
    steps.handed(batch(bad=True))
    with pytest.raises(BadBatchError):
        steps.unread.settle(wait=True)
    assert not steps.unread


def test_a_device_that_has_failed_is_left_to_say_so_to_the_training_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    steps.handed(batch(bad=True))

    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("guard_device_loop.Lag.synchronize", fail)
    steps.unread.settle(wait=True)
    assert not steps.unread
    assert steps.found == []
