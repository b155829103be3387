"""job.json: what it tells, and what it must not."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from torch_watchdog.launch.job_end import JobEnd, end_of
from torch_watchdog.launch.record import JobStart, at_end, at_start

START = JobStart(
    folder="/here",
    job="train-1",
    session="abc",
    command=("torchrun", "train.py"),
    options=("--policy", "stop"),
    policy="stop",
    daemon="unix:/run/x/daemon.sock",
    network=None,
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


END = JobEnd(
    job="train-1", run_dir="/runs/train-1", exit_code=65, stopped_by_us=True, ranks_reported=2, ranks_expected=2, steps=7,
    options=START.options, command=START.command, here="/runs",
)  # fmt: skip


def ended() -> dict[str, Any]:
    record = at_end(at_start(START, ["HOME"]), END, ended=datetime(2026, 2, 1, tzinfo=UTC), exit_reason="stopped", world_size=2)
    return json.loads(json.dumps(record, allow_nan=False))


def test_the_end_keeps_the_start_and_adds_how_it_ended() -> None:
    begun = at_start(START, ["HOME"])
    changed = {"ended": "2026-02-01T00:00:00.000Z", "exit_code": 65, "exit_reason": "stopped", "world_size": 2, "ranks_reported": 2}
    assert ended() == begun | changed | {"end": ended()["end"]}


def test_the_last_words_can_be_said_again_from_the_record() -> None:
    assert end_of(ended(), PurePath("/runs/train-1"), here="/runs", quarantine=None) == replace(END, folder="/here")


def test_a_launch_that_did_not_come_to_its_end_has_no_last_words() -> None:
    assert end_of(at_start(START, []), PurePath("/runs/train-1"), here="/", quarantine=None) is None


def test_the_number_of_a_slurm_job_is_kept() -> None:
    assert at_start(START, [])["scheduler"] is None
    assert at_start(replace(START, slurm_job_id="4711"), [])["scheduler"] == {"slurm_job_id": "4711"}
