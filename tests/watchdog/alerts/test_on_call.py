"""An incident's way to people: through a real Alertmanager to whom it tells, on to the next where nobody answers, by PagerDuty's own rules, to its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fleet_harness import BAD_TOKEN, Fleet, SimulatedNode, until
from http_receiver import HttpReceiver
from pagerduty_rules import KEY, faults_of
from services import AlertmanagerServer, needs

from torch_watchdog.alerts.routes import Match, Route
from torch_watchdog.daemon.client import DaemonClient
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog_proto import messages as m

CONFIG = """
route: {{receiver: team, group_by: [alertname, training_job], group_wait: 0s, group_interval: 1s}}
receivers: [{{name: team, webhook_configs: [{{url: "http://127.0.0.1:{port}/team"}}]}}]
"""


def dies(node: SimulatedNode) -> None:
    node.rank(0, 1)
    node.steps(0, 0, 1)
    node.exited(0, signal=9)
    node.goodbye(1)


def shown(team: HttpReceiver, status: str, job: str) -> list[Any]:
    """What Alertmanager has told the team of a job's alerts that are so."""
    alerts = [alert for body in team.bodies() for alert in body["alerts"]]
    return [alert for alert in alerts if alert["status"] == status and alert["labels"]["training_job"] == job]


@needs("prometheus-alertmanager")
def test_what_nobody_acknowledges_goes_from_alertmanager_on_to_the_pager_and_both_hear_its_end(root: Path) -> None:
    with (
        HttpReceiver() as team,
        HttpReceiver(faults=faults_of) as pager,
        AlertmanagerServer(root, CONFIG.format(port=team.port)) as manager,
    ):
        receivers = {"team": f"alertmanager://127.0.0.1:{manager.port}", "pager": f"pagerduty://{KEY}@127.0.0.1:{pager.port}"}
        route = Route(match=Match(), to=("team",), escalate_after_s=4.0, escalate_to=("pager",))
        with Fleet(root, alerts=AlertsConfig(receivers=receivers, routes=(route,), resend_s=0.5, restores_all=True)) as fleet:
            dies(fleet.node("taken"))
            until(lambda: shown(team, "firing", "taken"))
            with DaemonClient(fleet.socket) as client:
                assert client.acknowledge("taken/1", by="anna").accepted
            dies(fleet.node("left", session="l"))
            (first, *_) = until(lambda: shown(team, "firing", "left"))
            assert first["labels"]["alertname"] == "TrainingRankDied" and "mine: watchdog ack left/1" in first["annotations"]["description"]
            assert first["generatorURL"] == f"{fleet.url}jobs/left/incidents/1"
            until(lambda: pager.bodies(event_action="trigger"))
            until(lambda: any(alert["annotations"].get("acknowledged_by") == "anna" for alert in manager.alerts()))
            for job, session in (("left.2", "m"), ("taken.2", "u")):
                again = fleet.node(job, session=session)
                again.rank(0, 1)
                again.steps(0, 0)
            until(lambda: pager.bodies(event_action="resolve") and shown(team, "resolved", "left") and shown(team, "resolved", "taken"), 40)
        told = [(body["event_action"], body.get("payload", {}).get("group")) for body in pager.bodies()]
        assert told == [("trigger", "left"), ("resolve", None)] and pager.refused == []


HOSTILE = m.Violation(
    kind="batch.index_out_of_range", summary="s" * 20_000, cause="\x00\x1b[2J\u202e" * 500, fix="f\n" * 5_000,
    batch=m.BatchFact(key="k" * 5_000, element=(2, 7), value=70), bound=m.BoundFact(low=0, high=63, op="o" * 3_000, module="m" * 9_000),
)  # fmt: skip


@pytest.mark.parametrize("violation", [BAD_TOKEN, HOSTILE], ids=["plain", "hostile"])
def test_every_event_of_an_alerts_life_is_one_that_pagerduty_takes(root: Path, violation: m.Violation) -> None:
    """By its published rules: fields, values, lengths. The service itself is not reached from here."""
    with HttpReceiver(faults=faults_of) as pager:
        alerts = AlertsConfig.to_all((f"pagerduty://{KEY}@127.0.0.1:{pager.port}",), restores_all=True)
        with Fleet(root, alerts=alerts) as fleet:
            node = fleet.node("j" * 100, node="n" * 300)
            node.rank(0, 1)
            node.steps(0, 0, 1)
            node.say(m.Noticed(rank=0, step=2, micro_step=0, violation=violation))
            node.exited(0, signal=9)
            node.goodbye(1)
            until(lambda: pager.bodies(event_action="trigger") or pager.refused)
            with DaemonClient(fleet.socket) as client:
                for alert in client.alerts():
                    assert client.acknowledge(alert["name"], by="\u202e" + "a" * 500).accepted
            until(lambda: pager.bodies(event_action="acknowledge") or pager.refused)
            again = fleet.node("j" * 98 + ".2", session="t")
            again.rank(0, 1)
            again.steps(0, 0)
            with DaemonClient(fleet.socket) as client:
                assert client.alerts()
        assert pager.refused == []
        assert len({body["dedup_key"] for body in pager.bodies()}) == len(pager.bodies(event_action="trigger"))


def test_the_check_finds_what_pagerduty_refuses() -> None:
    good: dict[str, Any] = {
        "routing_key": KEY, "event_action": "trigger", "dedup_key": "k",
        "payload": {"summary": "s", "source": "h", "severity": "critical", "timestamp": "2026-01-31T00:00:00.000+00:00"},
    }  # fmt: skip
    assert faults_of(good) == []
    assert faults_of({"routing_key": KEY, "event_action": "resolve", "dedup_key": "k"}) == []
    for wrong in (
        {"routing_key": "short"},
        {"event_action": "raise"},
        {"dedup_key": "k" * 256},
        {"dedup_key": None},
        {"payload": None},
        {"x": 1},
    ):
        assert faults_of(good | wrong), wrong
    for wrong in (
        {"severity": "fatal"},
        {"summary": "s" * 1025},
        {"source": ""},
        {"timestamp": "now"},
        {"custom_details": {"x": os.urandom(300_000).hex()}},
    ):
        assert faults_of(good | {"payload": good["payload"] | wrong}), wrong
