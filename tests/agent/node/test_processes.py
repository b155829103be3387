"""The ends of processes that are not ours: seen, with their status, once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from torch_watchdog_agent.node.outside import stack_of
from torch_watchdog_agent.node.processes import Ended, ProcessWatch, is_alive

# A parent that leaves its child unreaped for as long as we look: as torchrun does for a tenth of a second.
PARENT = "import os, sys, time\npid = os.fork()\nif not pid:\n    {child}\nprint(pid, flush=True)\nsys.stdin.read()\n"


def ends_of(child: str, after: Callable[[int], None] = lambda pid: None) -> list[Ended]:
    with subprocess.Popen([sys.executable, "-c", PARENT.format(child=child)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        ended = asyncio.run(watched(pid, after))
        assert [one.pid for one in ended] == [pid]
        parent.communicate(b"")
        return ended


async def watched(pid: int, after: Callable[[int], None]) -> list[Ended]:
    ended: list[Ended] = []
    seen = asyncio.Event()

    def on_end(end: Ended) -> None:
        ended.append(end)
        seen.set()

    watch = ProcessWatch(on_end)
    watch.watch(pid)
    watch.watch(pid)
    after(pid)
    async with asyncio.timeout(20):
        await seen.wait()
    await watch.settle(1)
    watch.close()
    return ended


def test_an_exit_code_is_seen() -> None:
    assert ends_of("time.sleep(0.2); os._exit(3)")[0].exit_code == 3


def test_a_signal_is_seen() -> None:
    (ended,) = ends_of("time.sleep(60)", after=lambda pid: os.kill(pid, signal.SIGKILL))
    assert (ended.exit_code, ended.signal) == (None, signal.SIGKILL)


def test_a_process_that_had_ended_already_is_told_too() -> None:
    (ended,) = asyncio.run(watched(2**22 + 1, lambda pid: None))
    assert (ended.exit_code, ended.signal) == (None, None)


def test_a_zombie_is_not_alive() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        pass
    assert not is_alive(pid) and is_alive(os.getpid())
    os.waitpid(pid, 0)


KEEPER = "import ctypes; ctypes.CDLL(None).prctl(15, b'torch-watchdog'); import os, sys, time\n"  # by its name is a keeper known


@pytest.mark.parametrize(
    ("ends", "is_lost"),
    [("rank by 9", True), ("rank by 15", False), ("keeper by 9", True), ("kept rank by 9", True), ("nobody", False)],
)
def test_a_rank_that_is_lost_is_known_before_its_end_is_told(ends: str, is_lost: bool) -> None:
    """A launcher that has lost one sends the others SIGTERM at once: nobody has preempted the job."""
    parent_code = (KEEPER if "kep" in ends or "keeper" in ends else "") + PARENT.format(child="time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", parent_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        try:
            assert asyncio.run(lost_after(rank, parent.pid if ends.startswith("keeper") else rank, ends)) is is_lost
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
            parent.communicate(b"")


async def lost_after(rank: int, killed: int, ends: str) -> bool:
    watch = ProcessWatch(lambda _: None)
    watch.watch(rank)
    assert not watch.has_lost([rank])
    if ends != "nobody":
        os.kill(killed, signal.SIGTERM if ends.endswith("15") else signal.SIGKILL)
    deadline = time.monotonic() + 20  # the loop does not run meanwhile: its end cannot have been told
    while ends != "nobody" and is_alive(killed) and time.monotonic() < deadline:
        pass
    lost_before, _ = watch.has_lost([rank]), await watch.settle(0.2)
    assert ends == "keeper by 9" or watch.has_lost([rank]) is lost_before
    watch.close()
    return lost_before


@pytest.mark.parametrize("pid", [0, 1, -5])
def test_a_pid_that_can_be_no_rank_is_ignored(pid: int) -> None:
    async def look() -> None:
        watch = ProcessWatch(lambda end: pytest.fail(f"{end}"))
        watch.watch(pid)
        await watch.settle(0.05)
        watch.close()

    asyncio.run(look())


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_a_process_that_holds_the_interpreters_lock_is_read_from_outside() -> None:
    script = "import ctypes\ndef stuck():\n    print('here', flush=True)\n    ctypes.PyDLL(None).pause()\nstuck()\n"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stack = stack_of(process.pid)
        process.kill()
    assert "stuck (<string>:4)" in stack.splitlines()[0]


def test_a_process_that_is_not_there_has_no_stack() -> None:
    assert stack_of(2**22 + 1) == ""
