"""Alerts from a daemon to real receivers: over HTTP, through restarts, and to a real Alertmanager."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_harness import BAD_TOKEN, Fleet, SimulatedNode, until
from http_receiver import HttpReceiver
from services import AlertmanagerServer, needs

from torch_watchdog.alerts.heard import why
from torch_watchdog.alerts.routes import Match, Route
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog_proto import messages as m


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


@pytest.mark.parametrize(
    ("is_central", "mine"), [(True, "mine: watchdog ack job/1 --daemon "), (False, "mine: acknowledge it where it reached you: ")]
)
def test_apprise_is_told_in_words(root: Path, is_central: bool, mine: str) -> None:
    """A central daemon goes on when the job has ended, and takes an acknowledgement; a launch's own does not."""
    with HttpReceiver() as receiver:
        url = f"json://127.0.0.1:{receiver.port}/hook"
        with Fleet(root, alerts=pager(receiver, receivers={"pager": url}, restores_all=is_central)) as fleet:
            dies(fleet.node())
            until(lambda: receiver.got)
        ((path, body),) = receiver.got
        assert path == "/hook" and body["type"] == "failure" and body["title"].startswith("job: a rank died")
        assert mine in body["message"]


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


@pytest.mark.parametrize(
    ("status", "said"), [(404, "error=404"), (None, "[Errno 111] Connection refused")], ids=["answers no", "is not there"]
)
def test_the_test_of_a_service_of_apprises_shows_why_it_failed_and_no_secret(root: Path, status: int | None, said: str) -> None:
    import sys

    with HttpReceiver() as receiver:
        receiver.status = status or 200
        url = f"json://anna:hidden@127.0.0.1:{receiver.port if status else 9}/S3CRET/127.0.0.2?+X-Key=T0KEN"
        command = [sys.executable, "-m", "torch_watchdog.cli", "alert", "test", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and said in done.stderr and "Check host, port and key" in done.stderr, done.stderr
    assert "Try `watchdog alert test" not in done.stderr
    assert not any(word in done.stderr for word in ("hidden", "S3CRET", "127.0.0.2", "T0KEN", "Traceback"))


def test_what_a_service_complains_of_names_no_word_of_its_url() -> None:
    records = [
        logging.makeLogRecord({"levelno": logging.WARNING, "msg": "no channel at hooks.example.org for SG.one.two of webhook, key ab12"}),
        logging.makeLogRecord({"levelno": logging.DEBUG, "msg": "url: /SG.one.two (Caused by X: [Errno 111] Connection refused'))"}),
    ]
    told = why(records, "slack://SG.one.two:ab12@hooks.example.org/hook")
    assert told == "no channel at hooks.example.org for *** of webhook, key *** ([Errno 111] Connection refused)"


def _epoch_s(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
