"""Jobs whose nodes are silent: who is told, and of which nobody is told because they have ended."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from fleet_harness import Fleet, until
from http_receiver import HttpReceiver
from test_receivers import dies, pager

from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog.launch.unsaid import hand_in, leave_note
from torch_watchdog.store.left_running import runs_left_running
from torch_watchdog.store.run_directory import write_json
from torch_watchdog_proto import messages as m


def test_nodes_that_are_gone_without_a_goodbye_are_told_of_and_resolved_when_they_are_back(root: Path) -> None:
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver, silent_s=0.2)) as fleet:
        fleet.training().close()
        until(lambda: receiver.bodies(event_action="trigger"))
        assert receiver.bodies()[0]["payload"]["class"] == "watchdog.job_silent"
        assert receiver.bodies()[0]["payload"]["summary"] == "job: 1 of 1 nodes silent"
        fleet.node()
        until(lambda: receiver.bodies(event_action="resolve"))


def test_a_silent_run_whose_requeue_reports_is_told_of_once_and_resolved(root: Path) -> None:
    """The old run never says goodbye: its silence is over all the same, for good."""
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver, silent_s=0.2)) as fleet:
        fleet.training().close()
        until(lambda: receiver.bodies(event_action="trigger"))
        again = fleet.training("job.2", session="t")
        until(lambda: receiver.bodies(event_action="resolve"))
        dies(fleet.node("other", session="o"))  # later than many looks at the clock
        until(lambda: len(receiver.got) >= 3)
        again.steps(0, 1)
        told = [(body["event_action"], body.get("payload", {}).get("class")) for body in receiver.bodies()]
        assert told == [("trigger", "watchdog.job_silent"), ("resolve", None), ("trigger", "rank.died")]


def left(receiver: HttpReceiver, silent_s: float = 0.3) -> AlertsConfig:
    return pager(receiver, silent_s=silent_s, restores_all=True)


def test_a_job_that_died_while_no_daemon_was_there_is_told_of_by_the_next_and_resolved_by_its_requeue(root: Path) -> None:
    with HttpReceiver() as receiver:
        with Fleet(root) as first:
            for job, code in (("job", None), ("finished", 0)):
                node = first.training(job, session=job)
                if code is not None:
                    node.goodbye(code)
        with Fleet(root, alerts=left(receiver)) as second:
            (told,) = until(lambda: receiver.bodies(event_action="trigger"))
            assert (told["payload"]["class"], told["payload"]["summary"]) == ("watchdog.job_silent", "job: 1 of 1 nodes silent")
            assert "since this daemon tells of it: it has ended, or died, while none did" in told["payload"]["custom_details"]["lines"][0]
            second.training("job.2", session="t")
            until(lambda: receiver.bodies(event_action="resolve"))
        assert [body["event_action"] for body in receiver.bodies()] == ["trigger", "resolve"]


def test_a_job_that_ended_while_no_daemon_was_there_is_told_of_to_nobody_where_its_launch_has_written_so(root: Path) -> None:
    """In its own folder, which this daemon sees. That of another launch says nothing of it."""
    for folder, session in (("ended", "ended"), ("another", "x"), ("runs-on", "runs-on")):
        ended = None if folder == "runs-on" else "2026-11-28T12:00:00Z"
        write_json(root / "launches" / folder / "job.json", {"schema_version": 1, "session": session, "ended": ended})
    with HttpReceiver() as receiver:
        with Fleet(root) as first:
            for job in ("ended", "another", "runs-on"):
                first.training(job, session=job, run_dir=str(root / "launches" / job))
        assert [run.job for run in runs_left_running(first.runs, now_s=time.time())] == ["another", "runs-on"]
        with Fleet(root, alerts=left(receiver, silent_s=4.0)):  # time for the line below, on a machine that is busy
            write_json(
                root / "launches" / "runs-on" / "job.json", {"schema_version": 1, "session": "runs-on", "ended": "2026-11-28T12:00:01Z"}
            )
            until(lambda: receiver.bodies(event_action="trigger"))
        assert [body["payload"]["group"] for body in receiver.bodies(event_action="trigger")] == ["another"]


def test_a_launch_that_ended_while_no_daemon_was_there_has_the_next_one_say_so(root: Path) -> None:
    with HttpReceiver() as receiver:
        with Fleet(root) as first:
            first.training(run_dir="/of/another/machine")
            first.training("busy", session="of another launch").goodbye(0)
        hello = m.NodeHello(
            job="job", node="node-0", version="0.1.0", policy="stop", command=(), run_dir="/of/another/machine", session="s"
        )
        leave_note(root / "there", first.socket, hello, m.NodeGoodbye(exit_code=0))
        leave_note(root / "there", "unix:/of/another/daemon", replace(hello, job="not-ours"), m.NodeGoodbye(exit_code=0))
        leave_note(root / "there", first.socket, replace(hello, job="busy", session="x"), m.NodeGoodbye(exit_code=0))
        (root / "there" / ".unsaid" / "broken.goodbye").write_text("no note")
        leave_note(root / "there", first.socket, replace(hello, job="old"), m.NodeGoodbye(exit_code=0))
        os.utime(root / "there" / ".unsaid" / "old.goodbye", (1.0, 1.0))
        hand_in(root / "there", first.socket, lambda: DaemonClient(first.socket, timeout_s=0.5))
        assert len(list((root / "there").glob("*/*"))) == 4, "nobody was there: all are kept but the broken one"
        with Fleet(root, alerts=left(receiver)) as second:
            until(lambda: receiver.bodies(event_action="trigger"))
            hand_in(root / "there", second.socket, lambda: DaemonClient(second.socket))
            until(lambda: receiver.bodies(event_action="resolve"))
            (job,) = (one for one in second.get("api/v1/jobs").json()["jobs"] if one["job"] == "job")
            assert (job["state"], job["exit_code"]) == ("ended", 0)
            assert sorted(path.name for path in (root / "there").glob("*/*")) == ["busy.goodbye", "not-ours.goodbye"]


def test_a_job_that_comes_back_to_the_next_daemon_in_time_is_told_of_to_nobody_and_late_it_is_resolved(root: Path) -> None:
    with HttpReceiver() as receiver:
        with Fleet(root) as first:
            for job in ("early", "late"):
                first.training(job, session=job)
        with Fleet(root, alerts=left(receiver, silent_s=4.0)) as second:
            second.node("early", session="early")
            until(lambda: receiver.bodies(event_action="trigger"))
            second.node("late", session="late")
            until(lambda: receiver.bodies(event_action="resolve"))
        first_told, _ = receiver.bodies()
        assert first_told["payload"]["group"] == "late"


def test_a_job_that_was_not_heard_of_for_hours_before_is_news_to_nobody(root: Path) -> None:
    with Fleet(root) as first:
        first.training()
    now_s = time.time()
    assert [run.job for run in runs_left_running(first.runs, now_s=now_s)] == ["job"]
    assert runs_left_running(first.runs, now_s=now_s + 4000) == [] == runs_left_running(first.runs, now_s=now_s, names=("other",))
    assert runs_left_running(root / "none", now_s=now_s) == []


def test_a_job_that_said_goodbye_is_not_silent(root: Path) -> None:
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver, silent_s=0.1)) as fleet:
        node = fleet.node()
        node.rank(0, 1)
        node.goodbye(0)
        node.close()
        dies(fleet.node("other", session="t"))
        until(lambda: receiver.got)
        assert {body["payload"]["class"] for body in receiver.bodies()} == {"rank.died"}
