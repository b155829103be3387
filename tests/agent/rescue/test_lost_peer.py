"""A rank that loses another in a collective, whatever its script makes of the error: its end waits for a word, and what it held is there to be saved."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from part_of_a_rank import PartOfARank

from torch_watchdog_agent.rescue import ending, lingering, rescuer
from torch_watchdog_agent.rescue.lingering import Lingering
from torch_watchdog_agent.rescue.rescuer import Rescuer
from torch_watchdog_proto.messages import Leave
from torch_watchdog_proto.rescue_words import Free, Freed

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:22123")
FREE = Free(generation=7, reason="rank 1: it fell", exit_code=3)


@pytest.fixture
def rank(tmp_path: Path) -> Any:
    part: Any = PartOfARank(tmp_path)
    part.guarding, part.saver = True, SimpleNamespace(busy=False)
    part.rescuer = Rescuer(part, leave=lambda: None)
    return part


def test_a_rank_that_has_caught_it_waits_for_a_word_at_its_end(rank: Any) -> None:
    rank.rescuer.lost_peer.met(LOST)
    at_end = threading.Thread(target=rank.rescuer.await_word, daemon=True)
    at_end.start()
    rank.rescuer.takes(FREE)
    assert rank.heard.wait(20) and isinstance(rank.told[0], Freed)
    assert at_end.is_alive()
    rank.rescuer.takes(Leave(generation=7))
    at_end.join(20)
    assert not at_end.is_alive()


def test_where_no_word_comes_the_wait_ends(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescuer, "WORD_TIMEOUT_S", 0.01)
    rank.rescuer.lost_peer.met(LOST)
    rank.rescuer.await_word()


@pytest.mark.parametrize("how", ["another error", "an update since", "a new group", "observed", "alone", "nobody hears", "nothing"])
def test_nobody_waits_at_the_end_of_a_training_that_has_lost_no_other(rank: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.config.policy = "observe" if how == "observed" else "stop"
    rank.identity.world_size = 1 if how == "alone" else 2
    rank.guarding = how != "nobody hears"
    if how != "nothing":
        rank.rescuer.lost_peer.met(RuntimeError("shape '[3]' is invalid for input of size 4") if how == "another error" else LOST)
    if how == "an update since":
        rank.rescuer.after_gate(window_closed=False)
    if how == "a new group":
        rank.rescuer.lost_peer.went_on()
    monkeypatch.setattr(rescuer, "WORD_TIMEOUT_S", 1e9)
    rank.rescuer.await_word()


def test_what_is_trained_is_held_until_the_training_goes_on(rank: Any) -> None:
    class Model: ...

    model = Model()
    rank.subjects.now = lambda held=model: held
    is_gone = weakref.ref(model)
    rank.rescuer.lost_peer.met(LOST)
    rank.subjects.now = lambda: None
    del model
    gc.collect()
    assert is_gone() is not None
    rank.rescuer.after_gate(window_closed=False)
    gc.collect()
    assert is_gone() is None


def test_an_end_at_once_is_heard_of_first_and_comes_whatever_that_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "_exit", done.append)

    def about_to() -> None:
        done.append("heard")
        raise KeyboardInterrupt

    ending.hear_ends_at_once(about_to)
    with pytest.raises(KeyboardInterrupt):  # (a real one does not come back)
        os._exit(3)
    assert done == ["heard", 3]


class EndedError(Exception):
    """In the place of the end of the process."""


class Story:
    """What a process that lingers meets, a quarter of a second at a time."""

    def __init__(self, rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.rank = 0.0, rank
        self.over_at, self.script_at, self.goes_at = 1.0, 2.0, 1e9
        monkeypatch.setattr(lingering, "waits_for_threads", lambda: self.script_at <= self.now)

    def pause(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.goes_at:
            raise SystemExit

    def end(self, status: int) -> None:
        raise EndedError(status)

    def lingering(self) -> Lingering:
        return Lingering(self.rank, is_over=lambda: self.now >= self.over_at, clock=lambda: self.now, pause=self.pause, end=self.end)


@pytest.mark.parametrize(("grace_s", "raised", "status", "ends_at"), [(300.0, True, 1, 32.0), (15.0, False, 3, 17.0)])
def test_a_process_that_a_thread_keeps_is_ended_with_the_status_of_its_script(
    rank: Any, grace_s: float, raised: bool, status: int, ends_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.config.grace_s = grace_s
    story = Story(rank, monkeypatch)
    one = story.lingering()
    one.status = lambda: 3
    monkeypatch.setattr(one, "watch", lambda: None)
    if raised:
        one.failed()
    with pytest.raises(EndedError, match=f"^{status}$"):
        one.wait()
    assert story.now == pytest.approx(ends_at, abs=0.3)
    (said,) = rank.said
    assert "the script of this rank has ended, but a thread that it had started" in said and f"{min(grace_s, 30):g} s" in said


@pytest.mark.parametrize("why", ["its script goes on", "the rescue goes on", "nobody watches", "it ends by itself"])
def test_a_process_that_is_not_kept_is_left_alone(rank: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(rank, monkeypatch)
    story.goes_at = 30.0 if why == "it ends by itself" else 1000.0
    story.over_at = 1e9 if why == "the rescue goes on" else 1.0
    story.script_at = 1e9 if why == "its script goes on" else 2.0
    rank.guarding = why != "nobody watches"
    with pytest.raises(SystemExit):
        story.lingering().wait()
    assert not rank.said
