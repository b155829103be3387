"""job.json: what it tells, and what it must not."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from torch_watchdog.launch.record import JobStart, at_end, at_start

START = JobStart(
    job="train-1",
    session="abc",
    command=("torchrun", "train.py"),
    options=("--policy", "stop"),
    policy="stop",
    daemon="unix:/run/x/daemon.sock",
    host="node-a",
    user="ann",
    pid=7,
    versions={"torch_watchdog": "0.1.0"},
    resume=None,
    started=datetime(2026, 1, 31, 23, 59, 58, tzinfo=UTC),
)


def test_a_launch_that_has_not_ended_says_so() -> None:
    record = at_start(START, ["HOME"])
    assert (record["schema_version"], record["started"], record["ended"], record["exit_code"]) == (
        1,
        "2026-01-31T23:59:58.000Z",
        None,
        None,
    )


def test_variables_are_listed_by_name_and_no_value_is_kept() -> None:
    assert at_start(START, ["WANDB_API_KEY", "HOME"])["environment"] == ["HOME", "WANDB_API_KEY"]


def test_the_end_keeps_the_start_and_adds_how_it_ended() -> None:
    begun = at_start(START, ["HOME"])
    ended = at_end(begun, ended=datetime(2026, 2, 1, tzinfo=UTC), exit_code=65, exit_reason="stopped", world_size=2, ranks_reported=2)
    changed = {"ended": "2026-02-01T00:00:00.000Z", "exit_code": 65, "exit_reason": "stopped", "world_size": 2, "ranks_reported": 2}
    assert ended == begun | changed
    json.dumps(ended, allow_nan=False)
