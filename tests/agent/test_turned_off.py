"""A rank whose own count stands still, because a hook of ours has turned itself off: it promises nothing and saves nothing, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from part_of_a_rank import PartOfARank

from torch_watchdog_agent import turned_off
from torch_watchdog_agent.gate import Gate
from torch_watchdog_agent.holds import Holds
from torch_watchdog_agent.hooks import active
from torch_watchdog_agent.rank import Rank
from torch_watchdog_agent.rescue.rescuer import Rescuer
from torch_watchdog_agent.saver import Saver
from torch_watchdog_proto.messages import CannotPromise, Commit, Leave, Prepare
from torch_watchdog_proto.rescue_words import Free, Freed


class Counting(PartOfARank):
    """With all that answers for its count."""

    _has_told_why = False
    _ordered, _cannot_promise = Rank._ordered, Rank._cannot_promise

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = Gate(0, lambda generation, commit: (commit, True))
        self.saver, self.holds = Saver(self, leave=lambda: None), Holds(self)  # type: ignore[arg-type]
        self.rescuer = Rescuer(self, leave=lambda: None)  # type: ignore[arg-type]


@pytest.fixture(params=["hand-over", "loader", "optimizer"])
def off(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A hook of that name meets a failure of ours."""
    monkeypatch.setattr(turned_off, "_off", set())

    @active.guarded(request.param)
    def body() -> None:
        raise LookupError("ours")

    body()
    return str(request.param)


@pytest.fixture
def rank(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


def test_it_tells_that_it_can_promise_nothing_each_time_and_says_so_once(rank: Counting, off: str) -> None:
    for generation in (1, 1, 2):
        (answer,) = rank._ordered(Prepare(generation=generation, veto=3))
        assert isinstance(answer, CannotPromise) and answer.generation == generation and off in answer.reason
    (line,) = rank.said
    assert f"its {off} hook had turned itself off" in line


def test_it_leaves_no_bad_batch_to_a_veto(rank: Counting, off: str) -> None:
    rank.gate.judge(0)
    assert not rank.holds._is_gated() and off in rank.holds._why_not()


def test_it_writes_no_part_of_a_checkpoint(rank: Counting, off: str, tmp_path: Path) -> None:
    saved, of_all = rank.saver._write(Commit(generation=1, path=str(tmp_path / "here")))
    assert saved.error is not None and off in saved.error and of_all == () and not (tmp_path / "here").exists()


def test_it_holds_nothing_for_a_rescue(rank: Counting, off: str) -> None:
    rank.rescuer.at_boundary(in_window=False)
    assert rank.rescuer.takes(Free(generation=7, reason="rank 1: it fell", exit_code=3))
    assert rank.heard.wait(20)
    (freed,) = rank.told
    assert isinstance(freed, Freed) and freed.holds == "nothing" and off in freed.why
    assert rank.rescuer.takes(Leave(generation=7))


def test_a_hook_that_counts_nothing_changes_nothing(rank: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turned_off, "_off", {"clipping"})
    rank.gate.judge(0)
    assert rank._ordered(Prepare(generation=1, veto=3)) and rank.holds._is_gated()
