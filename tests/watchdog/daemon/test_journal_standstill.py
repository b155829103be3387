"""A standstill has one line on the terminal of its launch, as soon as it is known who is late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch_watchdog.daemon.journal import AtTerminal, Listeners
from torch_watchdog_proto.envelopes import RankStatus

LATE = "rank 0 waits for rank 1: it is in train.py:40; no step for 13 s"
SOON = f"{LATE}; the watchdog itself ends rank 1 and frees the others once no step has come for 24 min"


def test_each_standstill_is_said_once_with_the_line_to_type() -> None:
    said: list[str] = []
    listeners, live = Listeners(AtTerminal(said.append)), _late(SOON, "late")
    for kind, step in (("rank.asked", None), ("rank.late", 24), ("rank.late", 24), ("rank.late", 30)):
        listeners.event(live, {"kind": kind, "attempt": 0, "rank": 1, "step": step, "text": LATE})
    (line,) = set(said)
    assert len(said) == 2 and line.startswith(f"{SOON}; if that does not end by itself, `kill -9 77` on gpu7 ends rank 1, "), said


def test_no_rank_is_to_be_killed_once_the_watchdog_acts_itself() -> None:
    said: list[str] = []
    AtTerminal(said.append).event(_late(LATE, "saving"), {"kind": "rank.late", "attempt": 0, "rank": 1, "step": 24, "text": LATE})
    assert said == [LATE]


def _late(standstill: str, phase: Any) -> Any:
    rank = RankStatus(rank=1, node="gpu7", pid=77, phase=phase, alive=True)
    job = SimpleNamespace(name="job", status=lambda: SimpleNamespace(standstill=standstill, ranks=(rank,), policy="stop"))
    return SimpleNamespace(job=job)
