"""A process group of zombies is one that does nothing any more."""

from __future__ import annotations

import os
import signal

from torch_watchdog_agent.group import lives


def in_its_own_group() -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            signal.pause()
        finally:
            os._exit(0)
    os.setpgid(pid, pid)
    return pid


def test_a_group_lives_as_long_as_one_of_it_is_more_than_a_zombie() -> None:
    pid = in_its_own_group()
    try:
        assert lives(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, not reaped
    os.killpg(pid, 0)  # a signal still finds it
    assert not lives(pid)
    os.waitpid(pid, 0)
