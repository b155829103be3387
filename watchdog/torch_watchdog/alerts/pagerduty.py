"""PagerDuty's Events API v2: an alert as one of its events.

Owns the field names and lengths of that API. Pure: deliveries in, a JSON object out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from torch_watchdog.alerts.alert import Delivery

__all__ = ["DEFAULT_HOST", "event"]

DEFAULT_HOST = "events.pagerduty.com"
_SUMMARY_CHARS = 1024


def event(delivery: Delivery, routing_key: str) -> dict[str, Any]:
    """The body of POST /v2/enqueue. Only a trigger carries a payload."""
    alert = delivery.alert
    body: dict[str, Any] = {"routing_key": routing_key, "event_action": delivery.action, "dedup_key": f"torch-watchdog/{alert.key}"}
    if delivery.action != "trigger":
        return body
    body["payload"] = {
        "summary": alert.title[:_SUMMARY_CHARS],
        "source": alert.node or alert.training_job,
        "severity": alert.severity,
        "timestamp": datetime.fromtimestamp(alert.starts_s, UTC).isoformat(timespec="milliseconds"),
        "component": "training" if alert.rank is None else f"rank {alert.rank}",
        "group": alert.training_job,
        "class": alert.kind,
        "custom_details": {"incident": alert.name, "lines": list(alert.lines)},
    }
    links = [{"href": alert.page, "text": "Incident"}] if alert.page else []
    links += [{"href": alert.runbook, "text": "Runbook"}] if alert.runbook else []
    return body | {"client": "torch-watchdog", "links": links}
