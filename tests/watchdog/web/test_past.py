"""Jobs that ended before this daemon began are on its pages, from their run directories; nothing is written there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fleet_harness import BAD_TOKEN, Fleet, until

from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.errors import UnknownJobError
from torch_watchdog.store.past import MAX_JOBS, past_job, past_jobs
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import OrderAnswer

RECORD = {
    "schema_version": 1, "job": "job", "command": ["torchrun", "train.py"], "folder": "/home/a", "options": [], "policy": "stop",
    "started": "2026-01-31T00:00:00.000Z", "ended": "2026-01-31T00:01:00.000Z", "exit_code": 65, "exit_reason": "stopped", "world_size": 2,
    "ranks_reported": 2, "end": {"stopped_by_us": True, "steps": 3},
}  # fmt: skip


def files_of(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def later(tmp_path: Path) -> Iterator[Fleet]:
    """A second daemon over the run directories of one that has ended."""
    with Fleet(tmp_path) as first:
        node = first.node()
        node.rank(0, 2)
        node.rank(1, 2)
        node.steps(0, 0, 1, 2)
        node.steps(1, 0, 1, 2)
        node.say(m.Noticed(rank=1, step=2, micro_step=0, violation=BAD_TOKEN))
        until(first.incidents)
        node.goodbye(1)
    with Fleet(tmp_path) as second:
        yield second


def test_it_is_listed_and_shown_with_its_incidents_and_ranks(later: Fleet) -> None:
    before = files_of(later.runs)
    listed = later.get("api/v1/jobs").json()["jobs"]
    assert [(job["job"], job["state"], job["incidents"], job["exit_code"]) for job in listed] == [("job", "ended", 1, 1)]
    assert '<a href="/jobs/job">job</a>' in later.get("").text
    page = later.get("jobs/job").text
    assert "It ended before this daemon began" in page and "batch.index_out_of_range" in page and ">rank 1</a>" in page
    assert "input_ids[2,7]" in later.get("jobs/job/incidents/1").text and "Step by step" in later.get("jobs/job/ranks/1").text
    job = later.get("api/v1/jobs/job").json()
    assert [rank["last_step"] for rank in job["ranks"]] == [2, 2] and later.incidents()[0]["kind"] == "batch.index_out_of_range"
    assert files_of(later.runs) == before


def test_what_its_launch_said_is_there_where_its_record_is(later: Fleet) -> None:
    assert "What the launch said" not in later.get("jobs/job").text
    (later.runs / "job" / "job.json").write_text(json.dumps(RECORD))
    page = later.get("jobs/job").text
    assert "What the launch said" in page and "exit code 65" in page and "2026-01-31 00:01:00 UTC" in page


def test_a_launch_that_was_killed_alone_is_not_shown_as_ended(tmp_path: Path) -> None:
    session = "00c0ffee00c0ffec"
    run(tmp_path / "runs", "alone", {"kind": "node.joined", "node": "n", "time": "2026-01-31T00:00:00+00:00"})
    record = RECORD | {"session": session, "host": socket.gethostname(), "ended": None, "exit_code": None, "exit_reason": None, "end": None}
    (tmp_path / "runs" / "alone" / "job.json").write_text(json.dumps(record))
    os.utime(tmp_path / "runs" / "alone" / "events.jsonl", (0, 0))
    variables, lives = {"TORCH_WATCHDOG_AGENT": f'{{"session":"{session}"}}'}, "print('up', flush=True); input()"
    with Fleet(tmp_path) as fleet, subprocess.Popen([sys.executable, "-c", lives], env=os.environ | variables, stdin=-1, stdout=-1) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"up\n"
        page = fleet.get("jobs/alone").text
        told = f"goes on unwatched: the launch was killed, 1 process of it lives on (pid {rank.pid}); `kill {rank.pid}` ends it"
        assert told in page and "It ended" not in page and "<td>running, unwatched" in fleet.get("").text
        for job in (fleet.get("api/v1/jobs").json()["jobs"][0], fleet.get("api/v1/jobs/alone").json()):
            assert (job["state"], job["unwatched"], job["problem"]) == ("running", True, told)
        with DaemonClient(fleet.socket) as client:
            assert client.jobs()[0].state == client.job("alone").state == "running"
            assert client.request("alone", "order.stop", by="me") == OrderAnswer(accepted=False, text=f"it {told}")
        with (tmp_path / "runs" / "alone" / "events.jsonl").open("a") as events:
            events.write(json.dumps({"kind": "rank.failed", "rank": 0, "attempt": 0, "time": "2026-01-31T00:00:01+00:00"}) + "\n")
        os.utime(tmp_path / "runs" / "alone" / "events.jsonl", (0, 0))
        assert "is ending unwatched: the launch was killed after rank 0 had failed" in fleet.get("jobs/alone").text
        rank.communicate(b"\n")
        assert fleet.get("api/v1/jobs").json()["jobs"][0]["state"] == "ended"
        page = fleet.get("jobs/alone").text
        assert "ended without a word" in page and "It ended before" in page and "<td>ended without a word" in fleet.get("").text


LONG = "x" * 300  # no folder can be called that


@pytest.mark.parametrize(
    "path",
    [
        *("jobs/other", "jobs/job/incidents/9", "jobs/job/ranks/7", "api/v1/jobs/other", "jobs/job/heat", "jobs/%00", "jobs/odd"),
        *(f"jobs/{LONG}", f"api/v1/jobs/{LONG}", f"api/v1/jobs/{LONG}/events", f"jobs/job/incidents/{LONG}", f"jobs/{LONG}/ranks/0"),
    ],
)
def test_what_is_not_there_is_told(later: Fleet, path: str) -> None:
    run(later.runs, "odd", {"kind": "node.left", "attempt": "x"})
    assert later.get(path).status_code == 404


def test_a_name_that_no_folder_can_have_is_no_jobs_over_grpc_either(later: Fleet) -> None:
    with DaemonClient(later.socket) as client:
        for asks in (
            client.job,
            client.incidents,
            lambda name: list(client.steps(name)),
            lambda name: client.request(name, "order.stop", by="me"),
        ):
            with pytest.raises(UnknownJobError):
                asks(LONG)


def test_an_order_for_it_is_refused_because_it_has_ended_wherever_it_is_asked(later: Fleet) -> None:
    answer = later.http.post("api/v1/jobs/job/orders", json={"kind": "order.stop"})
    assert (answer.status_code, answer.json()) == (409, {"accepted": False, "text": "it has ended"})
    assert (
        httpx.URL(later.http.post("jobs/job/orders", data={"kind": "order.stop"}).headers["location"])
        .params["said"]
        .endswith("it has ended")
    )
    with DaemonClient(later.socket) as client:
        assert client.request("job", "order.stop", by="me") == OrderAnswer(accepted=False, text="it has ended")
    for path in ("jobs/other/orders", f"jobs/{LONG}/orders"):
        assert later.http.post(f"api/v1/{path}", json={"kind": "order.stop"}).status_code == 404
        assert later.http.post(path, data={"kind": "order.stop"}).status_code == 404


def test_a_job_that_reports_again_is_shown_live_and_once(later: Fleet) -> None:
    later.node("new").rank(0, 1)
    until(lambda: [job["job"] for job in later.get("api/v1/jobs").json()["jobs"]] == ["new", "job"])
    assert "Ranks and time" in later.get("jobs/new").text


def run(folder: Path, name: str, *events: dict[str, object]) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_a_job_without_an_end_that_was_written_to_just_now_is_another_daemons(tmp_path: Path) -> None:
    joined = {"kind": "node.joined", "node": "n", "time": "2026-01-31T00:00:00+00:00"}
    run(tmp_path, "alive", joined)
    now_s = (tmp_path / "alive" / "events.jsonl").stat().st_mtime
    assert past_jobs(tmp_path, but=(), now_s=now_s + 5, known={}) == ([], 0) and past_job(tmp_path, "alive", now_s=now_s + 5) is None
    (found,), _ = past_jobs(tmp_path, but=(), now_s=now_s + 3600, known={})
    assert (found.state, found.exit_code, found.nodes) == ("ended", None, ("n",))


def test_the_newest_are_listed_and_the_others_counted(tmp_path: Path) -> None:
    for number in range(MAX_JOBS + 3):
        run(tmp_path, f"job-{number}", {"kind": "node.left", "exit_code": 0})
    found, older = past_jobs(tmp_path, but=("job-0",), now_s=0.0, known={})
    assert (len(found), older) == (MAX_JOBS, 2)
    assert past_jobs(tmp_path / "none", but=(), now_s=0.0, known={}) == ([], 0)


def test_what_no_daemon_writes_neither_holds_the_list_up_nor_takes_the_others_off_it(tmp_path: Path) -> None:
    good = '{"kind": "node.left", "exit_code": 0, "attempt": 0}\n'
    odd = {"attempt": '{"kind": "node.left", "attempt": "x"}', "rank": '{"kind": "rank.connected", "rank": []}', "good": good}
    for name, line in odd.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(line)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "events.jsonl")
    (tmp_path / "good" / "incidents" / "1").mkdir(parents=True)
    os.mkfifo(tmp_path / "good" / "incidents" / "1" / "incident.json")
    (tmp_path / "good" / "incidents" / "\u00b2").mkdir()
    (tmp_path / "good" / "scan").mkdir()
    for name in ("rank-0.json", "rank-0.jsonl"):
        os.mkfifo(tmp_path / "good" / "scan" / name)
    (tmp_path / "good" / "scan" / "rank-1.json").write_text("[]")
    os.makedirs(os.fsencode(tmp_path) + b"/\xff")
    (tmp_path / os.fsdecode(b"\xff") / "events.jsonl").write_text(good)
    found, older = past_jobs(tmp_path, but=(), now_s=time.time() + 1000, known={})
    assert ([status.job for status in found if status.job not in odd.keys() - {"good"}], older) == (["good"], 0)


def test_a_scan_is_shown_as_what_it_found_and_not_as_the_launch_beneath_it(later: Fleet) -> None:
    root = later.runs / "job"
    (root / "job.json").write_text(json.dumps(RECORD | {"policy": "skip", "exit_code": 0, "exit_reason": "finished"}))
    state = {"rank": 0, "world_size": 1, "batches": 9, "samples": 36, "total_batches": 9, "unconfirmed": 0, "driving": True, "seconds": 1.0}
    (root / "scan").mkdir()
    (root / "scan" / "rank-0.json").write_text(json.dumps(state | {"finished": True}))
    bad = {"rank": 0, "batch": 3, "dataset_index": 17, "key": "labels", "element": [2], "value": 9, "low": 0, "high": 3, "op": "embedding"}
    (root / "scan" / "rank-0.jsonl").write_text("".join(json.dumps(bad | {"dataset_index": index}) + "\n" for index in (17, 18)))
    incident = root / "incidents" / "1" / "incident.json"
    found = json.loads(incident.read_text())
    incident.write_text(json.dumps(found | {"action": found["action"] | {"policy": "skip"}}))
    listed = later.get("api/v1/jobs").json()["jobs"]
    assert [(job["policy"], job["incidents"], job["exit_code"]) for job in (*listed, later.get("api/v1/jobs/job").json())] == [
        ("scan", 2, 65)
    ] * 2
    page = later.get("jobs/job").text
    assert "ended, exit code 65" in page and "2 samples would fail" in page and "labels[2] = 9" in page
    assert "policy skip" not in page and "exit code 0" not in page and "finished" not in page
    assert "watchdog scan" in (of_it := later.get("jobs/job/incidents/1").text) and "policy skip" not in of_it
    with DaemonClient(later.socket) as client:
        assert (client.jobs()[0].policy, client.jobs()[0].exit_code) == ("scan", 65)
