"""`watchdog status --watch` on a terminal, of a job that runs and then ends."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_harness import Fleet, until
from terminal import Screen


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    root = Path(tempfile.mkdtemp(prefix="tw"))
    with Fleet(root) as made:
        yield made
    shutil.rmtree(root, ignore_errors=True)


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


def test_a_daemon_that_no_job_has_reported_to_is_not_taken_for_an_empty_folder(fleet: Fleet) -> None:
    screen = Screen([sys.executable, "-m", "torch_watchdog.cli", "jobs", "--daemon", fleet.socket])
    assert " ".join(screen.finished().split()) == f"no job is known to the daemon at {fleet.socket}"
