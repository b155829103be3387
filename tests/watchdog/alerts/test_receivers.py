"""Alerts from a daemon to real receivers: over HTTP, through restarts, and to a real Alertmanager."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_harness import BAD_TOKEN, Fleet, SimulatedNode, until
from http_receiver import HttpReceiver
from services import AlertmanagerServer, needs

from torch_watchdog.alerts.routes import Match, Route
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog.launch.unsaid import hand_in, leave_note
from torch_watchdog.store.left_running import runs_left_running
from torch_watchdog.store.run_directory import write_json
from torch_watchdog_proto import messages as m


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tw") as path:
        yield Path(path)


def pager(receiver: HttpReceiver, **more: Any) -> AlertsConfig:
    known: dict[str, Any] = {
        "receivers": {"pager": f"pagerduty://KEY@127.0.0.1:{receiver.port}"},
        "routes": (Route(match=Match(), to=("pager",)),),
    }
    return AlertsConfig(**known | more)


def dies(node: SimulatedNode) -> None:
    """The job's one rank dies, and the launcher with it: told at once, because the job has ended."""
    node.rank(0, 1)
    node.steps(0, 0, 1)
    node.exited(0, signal=9)
    node.goodbye(1)


def test_a_death_is_told_once_with_everything_that_is_known(root: Path) -> None:
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver)) as fleet:
        dies(fleet.node())
        until(lambda: receiver.got)
        ((path, body),) = receiver.got
        assert path == "/v2/enqueue" and body["payload"]["class"] == "rank.died"
        assert body["payload"]["summary"].startswith("job: a rank died, rank 0")
        assert body["links"][0]["href"] == f"{fleet.url}jobs/job/incidents/1"
        assert [alert["name"] for alert in fleet.get("api/v1/alerts").json()["alerts"]] == ["job/1"]


def test_a_requeue_that_trains_resolves_what_the_run_before_it_died_of(root: Path) -> None:
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver)) as fleet:
        dies(fleet.node())
        until(lambda: receiver.bodies(event_action="trigger"))
        again = fleet.node("job.2", session="t")
        again.rank(0, 1)
        again.steps(0, 0)
        until(lambda: receiver.bodies(event_action="resolve"))
        first, last = receiver.bodies()
        assert first["dedup_key"] == last["dedup_key"]


def test_the_next_daemon_resolves_what_the_last_one_left_standing(root: Path) -> None:
    """As a launch with its own daemon does, when the job is requeued."""
    with HttpReceiver() as receiver:
        with Fleet(root, alerts=pager(receiver, last_words=True)) as fleet:
            dies(fleet.node())
        assert [body["event_action"] for body in receiver.bodies()] == ["trigger"]
        assert json.loads((root / "runs" / "job" / "alerts.json").read_text())["alerts"][0]["alert"]["kind"] == "rank.died"
        with Fleet(root, alerts=pager(receiver, last_words=True)) as fleet:
            node = fleet.node("job.2", session="t")
            node.rank(0, 1)
            node.steps(0, 0)
            until(lambda: receiver.bodies(event_action="resolve"))
        assert [body["event_action"] for body in receiver.bodies()] == ["trigger", "resolve"]
        assert json.loads((root / "runs" / "job" / "alerts.json").read_text())["alerts"] == []


def test_a_receiver_that_is_away_gets_it_when_it_is_back_and_the_terminal_hears_of_it_once(root: Path) -> None:
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver)) as fleet:
        receiver.status = 500
        dies(fleet.node())
        until(lambda: fleet.said)
        receiver.status = 202
        until(lambda: receiver.got)
        until(lambda: len(fleet.said) == 2)
        assert "alert receiver pager said 500" in fleet.said[0] and "KEY" not in "".join(fleet.said)
        assert fleet.said[1] == "alert receiver pager takes alerts again"
        text = fleet.get("metrics").text
        assert 'torch_watchdog_alert_deliveries_total{outcome="delivered",receiver="pager"} 1.0' in text
        assert 'torch_watchdog_alert_deliveries_total{outcome="failed",receiver="pager"}' in text
        assert 'torch_watchdog_alerts_open{severity="critical"} 1.0' in text


def test_a_bad_batch_is_told_by_its_sample_and_an_acknowledgement_reaches_the_pager(root: Path) -> None:
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver)) as fleet:
        node = fleet.node()
        node.rank(0, 1)
        node.say(m.Noticed(rank=0, step=3, micro_step=0, violation=BAD_TOKEN))
        until(lambda: receiver.got)  # after the time in which a stop could have been told with it
        with DaemonClient(fleet.socket) as client:
            assert client.alerts()[0]["name"] == "job/1"
            assert not client.acknowledge("job/9", by="anna").accepted
            assert client.acknowledge("job/1", by="anna").accepted
        until(lambda: receiver.bodies(event_action="acknowledge"))


def test_a_silence_over_the_wire_keeps_quiet(root: Path) -> None:
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver)) as fleet:
        with DaemonClient(fleet.socket) as client:
            assert client.silence(jobs=["job"], kinds=[], severities=[], seconds=600, by="anna", comment="move").accepted
        dies(fleet.node())
        dies(fleet.node("other", session="t"))
        until(lambda: receiver.got)
        assert [body["payload"]["group"] for body in receiver.bodies()] == ["other"]


def test_nodes_that_are_gone_without_a_goodbye_are_told_of_and_resolved_when_they_are_back(root: Path) -> None:
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver, silent_s=0.2)) as fleet:
        node = fleet.node()
        node.rank(0, 1)
        node.steps(0, 0)
        node.close()
        until(lambda: receiver.bodies(event_action="trigger"))
        assert receiver.bodies()[0]["payload"]["class"] == "watchdog.job_silent"
        assert receiver.bodies()[0]["payload"]["summary"] == "job: 1 of 1 nodes silent"
        fleet.node()
        until(lambda: receiver.bodies(event_action="resolve"))


def test_a_silent_run_whose_requeue_reports_is_told_of_once_and_resolved(root: Path) -> None:
    """The old run never says goodbye: its silence is over all the same, for good."""
    with HttpReceiver() as receiver, Fleet(root, alerts=pager(receiver, silent_s=0.2)) as fleet:
        node = fleet.node()
        node.rank(0, 1)
        node.steps(0, 0)
        node.close()
        until(lambda: receiver.bodies(event_action="trigger"))
        again = fleet.node("job.2", session="t")
        again.rank(0, 1)
        again.steps(0, 0)
        until(lambda: receiver.bodies(event_action="resolve"))
        dies(fleet.node("other", session="o"))  # later than many looks at the clock
        until(lambda: len(receiver.got) >= 3)
        again.steps(0, 1)
        told = [(body["event_action"], body.get("payload", {}).get("class")) for body in receiver.bodies()]
        assert told == [("trigger", "watchdog.job_silent"), ("resolve", None), ("trigger", "rank.died")]


def left(receiver: HttpReceiver) -> AlertsConfig:
    return pager(receiver, silent_s=0.3, restores_all=True)


def test_a_job_that_died_while_no_daemon_was_there_is_told_of_by_the_next_and_resolved_by_its_requeue(root: Path) -> None:
    with HttpReceiver() as receiver:
        with Fleet(root) as first:
            for job, code in (("job", None), ("finished", 0)):
                node = first.node(job, session=job)
                node.rank(0, 1)
                node.steps(0, 0)
                if code is not None:
                    node.goodbye(code)
        with Fleet(root, alerts=left(receiver)) as second:
            (told,) = until(lambda: receiver.bodies(event_action="trigger"))
            assert (told["payload"]["class"], told["payload"]["summary"]) == ("watchdog.job_silent", "job: 1 of 1 nodes silent")
            assert "since this daemon tells of it: it has ended, or died, while none did" in told["payload"]["custom_details"]["lines"][0]
            again = second.node("job.2", session="t")
            again.rank(0, 1)
            again.steps(0, 0)
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
                node = first.node(job, session=job, run_dir=str(root / "launches" / job))
                node.rank(0, 1)
                node.steps(0, 0)
        assert [run.job for run in runs_left_running(first.runs, now_s=time.time())] == ["another", "runs-on"]
        with Fleet(root, alerts=left(receiver)):
            write_json(
                root / "launches" / "runs-on" / "job.json", {"schema_version": 1, "session": "runs-on", "ended": "2026-11-28T12:00:01Z"}
            )
            until(lambda: receiver.bodies(event_action="trigger"))
        assert [body["payload"]["group"] for body in receiver.bodies(event_action="trigger")] == ["another"]


def test_a_launch_that_ended_while_no_daemon_was_there_has_the_next_one_say_so(root: Path) -> None:
    with HttpReceiver() as receiver:
        with Fleet(root) as first:
            node = first.node(run_dir="/of/another/machine")
            node.rank(0, 1)
            node.steps(0, 0)
        hello = m.NodeHello(
            job="job", node="node-0", version="0.1.0", policy="stop", command=(), run_dir="/of/another/machine", session="s"
        )
        leave_note(root / "there", first.socket, hello, m.NodeGoodbye(exit_code=0))
        leave_note(root / "there", "unix:/of/another/daemon", replace(hello, job="not-ours"), m.NodeGoodbye(exit_code=0))
        hand_in(root / "there", first.socket, lambda: DaemonClient(first.socket, timeout_s=0.5))
        assert len(list((root / "there").glob("*/*"))) == 2, "nobody was there: the notes are kept"
        with Fleet(root, alerts=left(receiver)) as second:
            until(lambda: receiver.bodies(event_action="trigger"))
            hand_in(root / "there", second.socket, lambda: DaemonClient(second.socket))
            until(lambda: receiver.bodies(event_action="resolve"))
            (job,) = (one for one in second.get("api/v1/jobs").json()["jobs"] if one["job"] == "job")
            assert (job["state"], job["exit_code"]) == ("ended", 0)
            assert [path.name for path in (root / "there").glob("*/*")] == ["not-ours.goodbye"]


def test_a_job_that_comes_back_to_the_next_daemon_in_time_is_told_of_to_nobody_and_late_it_is_resolved(root: Path) -> None:
    with HttpReceiver() as receiver:
        with Fleet(root) as first:
            for job in ("early", "late"):
                node = first.node(job, session=job)
                node.rank(0, 1)
                node.steps(0, 0)
        with Fleet(root, alerts=left(receiver)) as second:
            second.node("early", session="early")
            until(lambda: receiver.bodies(event_action="trigger"))
            second.node("late", session="late")
            until(lambda: receiver.bodies(event_action="resolve"))
        first_told, _ = receiver.bodies()
        assert first_told["payload"]["group"] == "late"


def test_a_job_that_was_not_heard_of_for_hours_before_is_news_to_nobody(root: Path) -> None:
    with Fleet(root) as first:
        node = first.node()
        node.rank(0, 1)
        node.steps(0, 0)
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


def test_apprise_is_told_in_words(root: Path) -> None:
    with HttpReceiver() as receiver:
        url = f"json://127.0.0.1:{receiver.port}/hook"
        with Fleet(root, alerts=pager(receiver, receivers={"pager": url})) as fleet:
            dies(fleet.node())
            until(lambda: receiver.got)
        ((path, body),) = receiver.got
        assert path == "/hook" and body["type"] == "failure" and body["title"].startswith("job: a rank died")
        assert "mine: watchdog ack job/1" in body["message"]


@pytest.fixture
def alertmanager(root: Path) -> Iterator[AlertmanagerServer]:
    with AlertmanagerServer(root) as running:
        yield running


@needs("prometheus-alertmanager")
def test_a_real_alertmanager_shows_one_alert_through_changes_requeues_and_to_its_end(root: Path, alertmanager: AlertmanagerServer) -> None:
    config = AlertsConfig(
        receivers={"am": f"alertmanager://127.0.0.1:{alertmanager.port}"}, routes=(Route(match=Match(), to=("am",)),), resend_s=0.5
    )
    with Fleet(root, alerts=config) as fleet:
        dies(fleet.node())
        (shown,) = until(alertmanager.alerts)
        assert shown["labels"]["alertname"] == "TrainingRankDied" and shown["labels"]["training_job"] == "job"
        assert shown["status"]["state"] in ("active", "unprocessed")
        first_end = shown["endsAt"]
        until(lambda: alertmanager.alerts()[0]["endsAt"] > first_end)  # told again before it could be forgotten
        assert len(alertmanager.alerts()) == 1
        again = fleet.node("job.2", session="t")
        again.rank(0, 1)
        again.steps(0, 0)
        until(lambda: alertmanager.alerts() == [])


@needs("prometheus-alertmanager")
def test_the_last_words_of_a_launch_stay_in_alertmanager_until_its_requeue_trains(root: Path, alertmanager: AlertmanagerServer) -> None:
    config = AlertsConfig(
        receivers={"am": f"alertmanager://127.0.0.1:{alertmanager.port}"}, routes=(Route(match=Match(), to=("am",)),), last_words=True
    )
    with Fleet(root, alerts=config) as fleet:
        dies(fleet.node())
    (left,) = alertmanager.alerts()
    began, ends = (_epoch_s(left[name]) for name in ("startsAt", "endsAt"))
    assert ends - began > 86_000
    with Fleet(root, alerts=config) as fleet:
        node = fleet.node("job.2", session="t")
        node.rank(0, 1)
        node.steps(0, 0)
        until(lambda: alertmanager.alerts() == [])


@needs("prometheus-alertmanager")
def test_alertmanager_takes_the_test_alert_of_the_command_line(alertmanager: AlertmanagerServer) -> None:
    import sys

    command = [sys.executable, "-m", "torch_watchdog.cli", "alert", "test", f"alertmanager://127.0.0.1:{alertmanager.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "trigger: 200 OK\nresolve: 200 OK\n")


def test_the_test_of_a_receiver_that_says_no_shows_what_it_said(root: Path) -> None:
    import sys

    with HttpReceiver() as receiver:
        receiver.status = 400
        command = [sys.executable, "-m", "torch_watchdog.cli", "alert", "test", f"pagerduty://KEY@127.0.0.1:{receiver.port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "said 400 Bad Request" in done.stderr and "not today" in done.stderr and "KEY" not in done.stderr


def _epoch_s(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
