"""A rank's log over several attempts: who reads the words of one gets no other's, nor the line between them."""

from __future__ import annotations

import re
from pathlib import Path

from torch_watchdog_agent.attempt_mark import mark_attempt, newest_attempt, of_attempt
from torch_watchdog_agent.node.logs import RankLogs


def test_a_later_attempt_begins_with_a_line_of_its_own_and_the_first_has_none(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    mark_attempt(log, 0)
    mark_attempt(log, 1)
    assert not log.exists()
    log.write_bytes(b"first\ncut")
    mark_attempt(log, 0)
    mark_attempt(log, 1)
    with log.open("ab") as file:
        file.write(b"second\n")
    text = log.read_text()
    assert re.fullmatch(r"first\ncut\n\[torch-watchdog\] attempt 1, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\nsecond\n", text), text
    assert of_attempt(log.read_bytes(), 0) == b"first\ncut\n"
    assert of_attempt(log.read_bytes(), 1) == newest_attempt(log.read_bytes()) == b"second\n"
    assert of_attempt(log.read_bytes(), 2) == b""
    assert of_attempt(b"no mark\n", 3) == b"no mark\n"


def test_a_node_that_sees_the_rank_first_in_a_later_attempt_tells_nothing_of_the_one_before(tmp_path: Path) -> None:
    log, logs = tmp_path / "rank-0.log", RankLogs(tmp_path)
    log.write_bytes(b"terminate called in attempt 0\n")
    mark_attempt(log, 1)
    with log.open("ab") as file:
        file.write(b"Bus error in attempt 1\n")
    logs.begin(0)
    assert logs.look(0) == ["Bus error in attempt 1"]
