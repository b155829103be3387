"""A save of all ranks whose daemon is gone by its end: the lowest of those who wrote it seals it, and the others know of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torch_watchdog_agent.checkpoint.files import digested
from torch_watchdog_agent.checkpoint.manifest import verify
from torch_watchdog_agent.checkpoint.part import RankPart
from torch_watchdog_agent.saver import SEEN_WITHIN_S, Saver
from torch_watchdog_proto.messages import Commit, Committed, Saved

COMMIT = Commit(generation=3, stop_after=4, exit_code=0)


class Rank:
    """One of two. No word comes any more, and its clock moves on by a second each time that it is looked at."""

    def __init__(self, number: int, session: str = "a") -> None:
        self.identity = SimpleNamespace(rank=number, attempt=0, world_size=2)
        self.config = SimpleNamespace(job="j", session=session, grace_s=300.0)
        self.gate = SimpleNamespace(clock=self._clock, answer=lambda *_, **__: None)
        self.told: list[Any] = []
        self.tell = self.told.append
        self.said: list[str] = []
        self.say = self.said.append
        self.looks = 0

    def _clock(self) -> float:
        self.looks += 1
        return float(self.looks)


def finish(rank: Rank, place: Path, *, finite: bool = True) -> bool:
    partial = place.with_name(f"partial.{place.name}")
    if rank.identity.rank == 0:
        partial.mkdir(exist_ok=True)
        (partial / "rank-0.safetensors").write_text("weights")
    files = (digested(partial, "rank-0.safetensors"),) if partial.exists() else ()
    of_all = tuple(RankPart(rank=one, updates_applied=5, finite=finite, files=() if one else files) for one in (0, 1))
    saved = Saved(rank=rank.identity.rank, generation=3, updates_applied=5, path=str(place), format="dcp", files=files, finite=finite)
    commit = dataclasses.replace(COMMIT, path=str(place))
    return Saver(rank, leave=lambda: None)._finish(commit, saved, of_all)  # type: ignore[arg-type]


def test_every_rank_knows_that_it_was_sealed(tmp_path: Path) -> None:
    """The others had noted that there was none, and waited for a failure to be told of."""
    first, second = Rank(0), Rank(1)
    assert finish(first, tmp_path / "step-5") and finish(second, tmp_path / "step-5")
    assert verify(tmp_path / "step-5")["updates_applied"] == 5
    assert (first.told, second.told) == ([Committed(rank=0, generation=3)], [Committed(rank=1, generation=3)])


def test_what_was_not_sealed_is_waited_for_no_longer_than_that_takes(tmp_path: Path) -> None:
    rank = Rank(1)
    assert not finish(rank, tmp_path / "step-5")
    assert rank.told == [] and rank.looks <= SEEN_WITHIN_S + 3


@pytest.mark.parametrize("finite", [True, False])
def test_neither_what_another_launch_has_left_there_nor_what_is_not_finite_is_taken_for_it(finite: bool, tmp_path: Path) -> None:
    finish(Rank(0, session="earlier" if finite else "a"), tmp_path / "step-5", finite=finite)
    assert not finish(Rank(1), tmp_path / "step-5", finite=finite)
