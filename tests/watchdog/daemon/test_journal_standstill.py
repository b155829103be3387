"""A standstill has one line on the terminal of its launch, as soon as it is known who is late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch_watchdog.daemon.journal import AtTerminal, Listeners

LATE = "rank 0 waits for rank 1: it is in train.py:40; no step for 13 s"


def test_each_standstill_is_said_once_with_what_can_be_done() -> None:
    said: list[str] = []
    listeners, live = Listeners(AtTerminal(said.append)), _named("my job")
    for kind, step in (("rank.asked", None), ("rank.late", 24), ("rank.late", 24), ("rank.late", 30)):
        listeners.event(live, {"kind": kind, "attempt": 0, "rank": 1, "step": step, "text": LATE})
    assert said == [f"{LATE}; `watchdog stop 'my job'` says what to end"] * 2


def _named(name: str) -> Any:
    return SimpleNamespace(job=SimpleNamespace(name=name))
