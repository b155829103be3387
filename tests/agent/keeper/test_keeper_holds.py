"""A keeper holds its launcher back after a bad end, until it is released; never for ever, and never for nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from keeper_harness import DEADLINE_S, Stage, end_for_sure, eventually, is_alive, read_line

WATCHED = "from torch_watchdog_agent import keeper\nimport os\nkeeper.announce_watched()\nprint(os.getpid(), flush=True)\n"
HOLDING_S = 0.4  # as long as nothing should happen


def held(
    stage: Stage, code: str, monkeypatch: pytest.MonkeyPatch, *, launcher: int | None = None, grace_s: float = 60.0
) -> tuple[subprocess.Popen[bytes], Path]:
    """A keeper whose rank has run `code` to its end, and the file that lets it go."""
    released = stage.folder / "released-0-0"
    for name, value in (("RELEASED", released), ("LAUNCHER", launcher or os.getpid()), ("GRACE", grace_s)):
        monkeypatch.setenv(f"KEEPER_TEST_{name}", str(value))
    process = stage.start(code, stdout=subprocess.PIPE)
    pid = int(read_line(process))
    eventually(lambda: not is_alive(pid), "the rank ends")
    return process, released


def keeps_waiting(process: subprocess.Popen[bytes]) -> bool:
    descriptor = os.pidfd_open(process.pid)
    try:
        return not select.select([descriptor], [], [], HOLDING_S)[0]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("end", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -6)])
def test_a_bad_end_is_told_once_released_and_then_as_it_was(stage: Stage, monkeypatch: pytest.MonkeyPatch, end: str, code: int) -> None:
    process, released = held(stage, WATCHED + end, monkeypatch)
    assert keeps_waiting(process)
    released.touch()
    assert process.wait(DEADLINE_S) == code


@pytest.mark.parametrize("end", ["os._exit(0)", "keeper.announce_leave(); os._exit(65)"])
def test_a_good_end_and_our_own_are_told_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    process, _ = held(stage, WATCHED + end, monkeypatch)
    assert process.wait(DEADLINE_S) == 0


def test_the_end_of_a_rank_that_nobody_watches_is_told_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    process, _ = held(stage, WATCHED + "keeper.announce_watched(watched=False); os._exit(3)", monkeypatch)
    assert process.wait(DEADLINE_S) == 3


def test_it_holds_no_longer_than_the_grace(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    process, _ = held(stage, WATCHED + "os._exit(3)", monkeypatch, grace_s=HOLDING_S)
    assert process.wait(DEADLINE_S) == 3


def test_it_holds_no_longer_than_the_process_lives_that_could_release_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, _ = held(stage, WATCHED + "os._exit(3)", monkeypatch, launcher=launcher.pid)
    assert keeps_waiting(process)
    launcher.kill()
    launcher.wait()
    assert process.wait(DEADLINE_S) == 3


def test_a_signal_while_it_holds_neither_ends_it_nor_is_lost_on_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher itself was asked to end: 25 s are left to those who save."""
    process, released = held(stage, WATCHED + "os._exit(3)", monkeypatch)
    try:
        process.send_signal(signal.SIGTERM)
        assert keeps_waiting(process)
        released.touch()
        assert process.wait(DEADLINE_S) == 3
    finally:
        end_for_sure(process.pid)
