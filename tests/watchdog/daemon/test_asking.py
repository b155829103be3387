"""Commands that ask a daemon: one that keeps a job's record for its launch, and one that dies before an order is done."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_harness import Place, until
from fleet_harness import BAD_TOKEN, Fleet

from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog_proto.messages import Noticed, Prepare

WATCHDOG = [sys.executable, "-m", "torch_watchdog.cli"]


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="tw"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def write_record(directory: Path, daemon: str) -> None:
    """What a launch writes of itself."""
    directory.mkdir(parents=True, exist_ok=True)
    started = {"job": "job", "session": "s", "policy": "stop", "daemon": daemon, "started": "2026-01-31T00:00:00.000Z", "ended": None}
    write_json(RunDirectory(directory).job_file, started)


def ask(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WATCHDOG, *words], cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_job_whose_record_a_central_daemon_keeps_is_read_there_and_without_it_that_is_said(root: Path) -> None:
    launched = root / "watchdog_runs" / "job"
    with Fleet(root) as fleet:
        write_record(launched, fleet.socket)
        node = fleet.node(run_dir=str(launched))
        node.rank(0, 1)
        node.steps(0, 0, 1, 2)
        node.say(Noticed(rank=0, step=3, micro_step=0, violation=BAD_TOKEN))
        node.steps(0, 3)
        (root / "by-another-way").symlink_to(root / "watchdog_runs")
        write_json(RunDirectory(launched).contract_file(0), {"traces": 2, "guarded": [], "opaque": []})
        timeline, incidents = ask(root, "timeline", "job", "--dir", "by-another-way"), ask(root, "incidents", "job", "--json")
        contract = ask(root, "contract", "job", "--json")
    assert json.loads(contract.stdout)["traces"] == 2, contract.stderr
    assert "4 steps" in timeline.stdout, timeline.stderr
    assert [found["kind"] for found in json.loads(incidents.stdout)["incidents"]] == ["batch.index_out_of_range"]
    alone = ask(root, "timeline", "job")
    assert alone.returncode == 0
    assert alone.stderr.startswith(f"[torch-watchdog] what lies here of job job is not all: the daemon at {fleet.socket} keeps")


def test_a_job_that_ended_before_the_daemon_began_is_asked_for_as_one_that_reports(root: Path) -> None:
    """From its launch's folder, from one that has nothing of it, and by name at the daemon."""
    launched, elsewhere = root / "watchdog_runs" / "job", root / "elsewhere"
    elsewhere.mkdir()
    with Fleet(root) as first:
        node = first.node(run_dir=str(launched))
        node.rank(0, 1)
        node.steps(0, 0, 1, 2)
        node.say(Noticed(rank=0, step=3, micro_step=0, violation=BAD_TOKEN))
        node.steps(0, 3)
        node.goodbye(65)
    with Fleet(root) as second:
        write_record(launched, second.socket)
        there = ("--daemon", second.socket, "--json")
        jobs, status = ask(elsewhere, "jobs", *there), ask(elsewhere, "status", *there)
        incidents, timeline = ask(elsewhere, "incidents", "job", *there), ask(root, "timeline", "job")
        report, contract = ask(elsewhere, "report", "job", *there), ask(elsewhere, "contract", "job", *there[:2])
        stop, unknown = ask(elsewhere, "stop", "job", *there[:2]), ask(elsewhere, "status", "other", *there)
    assert [(job["job"], job["state"], job["exit_code"]) for job in json.loads(jobs.stdout)["jobs"]] == [("job", "ended", 65)]
    assert [(rank["rank"], rank["last_step"]) for rank in json.loads(status.stdout)["ranks"]] == [(0, 3)], status.stderr
    assert [found["kind"] for found in json.loads(incidents.stdout)["incidents"]] == ["batch.index_out_of_range"]
    assert "4 steps" in timeline.stdout and timeline.stderr == ""
    assert json.loads(report.stdout)["incident"]["kind"] == "batch.index_out_of_range"
    assert (
        contract.returncode != 0
        and f"what ranks have learned lies with their launch, not with this daemon: `watchdog contract` where {launched} is"
        in contract.stderr
    )
    assert stop.returncode != 0 and "it has ended" in stop.stderr and "other" in unknown.stderr


def test_an_order_whose_daemon_is_killed_is_not_waited_for_any_more(place: Place) -> None:
    daemon = place.daemon_process()
    place.node()
    rank = place.rank(0)
    until(lambda: place.num_ranks() == 1)
    write_record(place.run_dir, place.socket)
    asked = subprocess.Popen(
        [*WATCHDOG, "stop", "job", "--dir", str(place.runs)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert isinstance(rank.order(), Prepare)
    assert asked.stdout is not None and asked.stdout.readline() == "asked: every rank is told, and what comes of it is awaited\n"
    daemon.kill()
    out, err = asked.communicate(timeout=60)
    assert (asked.returncode, out) == (1, "")
    assert err == (
        "[torch-watchdog] job job: no verified checkpoint came of what was asked: its daemon is gone, and the ranks end by themselves what they had begun. "
        "See `watchdog status job`\n"
    )
