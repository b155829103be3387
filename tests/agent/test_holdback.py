"""How long a keeper holds back, by the clock of its machine."""

from __future__ import annotations

import os
from pathlib import Path

from torch_watchdog_agent.holdback import HURRIED_S, HoldBack, begun_file, released_file
from torch_watchdog_agent.node.keepers import newest_attempt


def test_a_hurry_leaves_25_seconds_whatever_the_grace_and_however_often_it_comes(tmp_path: Path) -> None:
    now = 100.0
    hold = HoldBack(tmp_path / "released", launcher_pid=os.getpid(), grace_s=300, clock=lambda: now)
    hold.begin()
    assert not hold.is_over(is_hurried=False)
    now += 100
    assert not hold.is_over(is_hurried=True)
    now += HURRIED_S - 1
    assert not hold.is_over(is_hurried=True)
    now += 1
    assert hold.is_over(is_hurried=True)


def test_a_file_of_another_attempt_or_rank_releases_nobody(tmp_path: Path) -> None:
    hold = HoldBack(released_file(tmp_path, attempt=1, rank=0), launcher_pid=os.getpid(), grace_s=300)
    hold.begin()
    released_file(tmp_path, attempt=0, rank=0).touch()
    released_file(tmp_path, attempt=1, rank=1).touch()
    assert not hold.is_over(is_hurried=False)
    released_file(tmp_path, attempt=1, rank=0).touch()
    assert hold.is_over(is_hurried=False)


def test_the_newest_attempt_is_that_of_which_a_process_was_there(tmp_path: Path) -> None:
    assert newest_attempt(tmp_path) == 0
    for attempt in (0, 9, 10):
        begun_file(tmp_path, attempt).touch()
    (tmp_path / "begun-else").touch()
    assert newest_attempt(tmp_path) == 10
