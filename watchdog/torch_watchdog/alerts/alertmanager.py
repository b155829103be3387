"""Alertmanager's API v2: an alert as one of its alerts.

Owns labels and annotations. The labels name the alert over all its life, so nothing that changes is among them: no step, value, sample, rank or node.
Pure: deliveries in, a JSON object out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from torch_watchdog.alerts.alert import Delivery, alert_name
from torch_watchdog.alerts.text import page_of, said

__all__ = ["posted"]


def posted(delivery: Delivery) -> list[dict[str, Any]]:
    """The body of POST /api/v2/alerts. It must be sent again before `endsAt`, or Alertmanager takes the alert for resolved."""
    alert = delivery.alert
    labels = {
        "alertname": alert_name(alert.kind), "training_job": alert.training_job, "kind": alert.kind, "severity": alert.severity,
        "incident_key": alert.key,
    }  # fmt: skip
    annotations = {"summary": alert.title, "description": "\n".join(said(delivery)), "incident": alert.name}
    annotations |= {"runbook_url": alert.runbook} if alert.runbook else {}
    annotations |= {"node": alert.node} if alert.node else {}
    annotations |= {"acknowledged_by": alert.acknowledged_by} if alert.acknowledged_by else {}
    found: dict[str, Any] = {
        "labels": labels,
        "annotations": annotations,
        "startsAt": _time(alert.starts_s),
        "endsAt": _time(delivery.ends_s),
    }
    page = page_of(delivery)
    return [found | ({"generatorURL": page} if page else {})]


def _time(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
