"""One thing that a daemon keeps of a run, as it travels to a shared store: a report, a line of events.jsonl, an incident, its stacks, the open alerts.

Owns the keys, which make keeping a thing twice the same as once. Without SQLAlchemy: every launch loads this.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["REPLACED", "Kind", "Record", "event_record", "json_record", "report_record", "stacks_record"]

Kind: TypeAlias = Literal["report", "event", "incident", "stacks", "alerts"]
REPLACED: frozenset[Kind] = frozenset({"incident", "stacks", "alerts"})  # the newest words count; a report or an event never changes
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One thing of a run. `body` is compressed."""

    run: str
    kind: Kind
    key: str
    body: bytes

    @property
    def content(self) -> bytes:
        return zlib.decompress(self.body)


def report_record(run: str, node: str, seq: int, stored: bytes) -> Record:
    """A node's name may be any text; what a database may not take as a key becomes its digest."""
    name = node if _PLAIN.fullmatch(node) else hashlib.sha256(node.encode("utf-8", "replace")).hexdigest()
    return Record(run=run, kind="report", key=f"{name}:{seq}", body=zlib.compress(stored, 1))


def event_record(run: str, event: Mapping[str, Any]) -> Record:
    """A line of events.jsonl, by its number. Raises ValueError for what is no JSON, as `json_record` does."""
    return _json(run, "event", f"{event.get('order', 0):012d}", event)


def json_record(run: str, kind: Literal["incident", "alerts"], key: str, value: Mapping[str, Any]) -> Record:
    return _json(run, kind, key, value)


def stacks_record(run: str, incident: str, text: str) -> Record:
    return Record(run=run, kind="stacks", key=incident, body=zlib.compress(text.encode(), 1))


def _json(run: str, kind: Kind, key: str, value: Mapping[str, Any]) -> Record:
    return Record(run=run, kind=kind, key=key, body=zlib.compress(json.dumps(value, allow_nan=False).encode(), 1))
