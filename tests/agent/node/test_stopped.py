"""A rank's process that is stopped is seen by what the kernel says, once a second at most."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from torch_watchdog_agent.node.stopped import Stopped


def test_a_process_that_is_stopped_and_continued_is_told_once_each() -> None:
    now = 100.0
    stopped = Stopped(clock=lambda: now)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        stopped.begun(process.pid)
        assert list(stopped.changes()) == []
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert list(stopped.changes()) == []  # it was looked at in this second
        now += 1
        assert list(stopped.changes()) == [(process.pid, "T")]
        now += 1
        assert list(stopped.changes()) == []
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        now += 1
        assert [pid for pid, state in stopped.changes() if state != "T"] == [process.pid]
        stopped.ended(process.pid)
        process.communicate(b"\n")
    now += 1
    assert list(stopped.changes()) == []
