"""What PagerDuty publishes of its Events API v2, as a check of a body: what the service itself would answer with 400 to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

__all__ = ["KEY", "faults_of"]

KEY = "0123456789abcdef0123456789abcdef"  # an integration's key has 32 characters
_ACTIONS, _SEVERITIES = {"trigger", "acknowledge", "resolve"}, {"critical", "error", "warning", "info"}
_FIELDS = {"routing_key", "event_action", "dedup_key", "payload", "client", "client_url", "links", "images"}
_PAYLOAD_FIELDS = {"summary", "source", "severity", "timestamp", "component", "group", "class", "custom_details"}
_MAX_EVENT_BYTES, _MAX_SUMMARY, _MAX_DEDUP_KEY = 512 << 10, 1024, 255


def faults_of(body: Any) -> list[str]:
    """Empty where the service takes it."""
    if not isinstance(body, dict):
        return ["no object"]
    found = [f"unknown field {name}" for name in body.keys() - _FIELDS]
    found += [] if re.fullmatch(r"[0-9A-Za-z]{32}", str(body.get("routing_key"))) else ["routing_key"]
    found += [] if body.get("event_action") in _ACTIONS else ["event_action"]
    key = body.get("dedup_key")
    found += [] if isinstance(key, str) and 0 < len(key) <= _MAX_DEDUP_KEY else ["dedup_key"]
    found += [] if len(json.dumps(body).encode()) <= _MAX_EVENT_BYTES else ["size"]
    found += [f"links {link}" for link in body.get("links", ()) if not str(link.get("href")).startswith(("http://", "https://"))]
    if body.get("event_action") == "trigger":
        found += _payload_faults(body.get("payload"))
    return found


def _payload_faults(payload: Any) -> list[str]:
    if not isinstance(payload, Mapping):
        return ["payload"]
    found = [f"unknown field payload.{name}" for name in payload.keys() - _PAYLOAD_FIELDS]
    found += [name for name in ("summary", "source") if not isinstance(payload.get(name), str) or not payload[name]]
    found += [] if len(str(payload.get("summary"))) <= _MAX_SUMMARY else ["summary's length"]
    found += [] if payload.get("severity") in _SEVERITIES else ["severity"]
    found += [name for name in ("component", "group", "class") if not isinstance(payload.get(name, ""), str)]
    found += [] if isinstance(payload.get("custom_details", {}), Mapping) else ["custom_details"]
    try:
        datetime.fromisoformat(payload["timestamp"])
    except (KeyError, TypeError, ValueError):
        found.append("timestamp")
    return found
