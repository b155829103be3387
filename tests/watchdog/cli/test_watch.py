"""`watchdog status --watch` on a terminal, of a job that runs and then ends."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_harness import Fleet, until


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    root = Path(tempfile.mkdtemp(prefix="tw"))
    with Fleet(root) as made:
        yield made
    shutil.rmtree(root, ignore_errors=True)


class Screen:
    """What a program has written to its terminal so far."""

    def __init__(self, command: list[str]) -> None:
        ours, theirs = pty.openpty()
        self.text = b""
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
        os.close(theirs)
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()

    def _read(self, terminal: int) -> None:
        try:
            while part := os.read(terminal, 4096):
                self.text += part
        except OSError:
            pass  # the other side is closed
        os.close(terminal)


def test_the_terminal_follows_the_job_until_it_ends(fleet: Fleet) -> None:
    node = fleet.node()
    node.rank(0, 1)
    node.steps(0, 0, 1, 2)
    screen = Screen([sys.executable, "-m", "torch_watchdog.cli", "status", "job", "--watch", "--daemon", fleet.socket])
    until(lambda: b"slowest rank 0" in screen.text, 60)
    node.steps(0, 3, 4, 71)
    until(lambda: b"at step 71" in screen.text, 60)
    node.goodbye()
    assert screen.process.wait(60) == 0
    until(lambda: b"ended, exit code 0" in screen.text)
