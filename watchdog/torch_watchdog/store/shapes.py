"""What the JSON files of a run directory hold, as far as their readers rely on it: a file of another form is refused as a whole, where it is read.

Owns types only, in the words of JSON Schema (`type`, `properties`, `items`): a newer version may write more names and more kinds. A name that is
missing is no fault here.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["CONTRACT", "JOB", "NEWEST_JOB_VERSION", "fits", "incident_schema", "object_of"]

Schema = Mapping[str, Any]
NEWEST_JOB_VERSION = 1

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
_TEXT: Schema = {"type": ["string", "null"]}
_NUMBER: Schema = {"type": ["integer", "null"]}
_WORDS: Schema = {"type": ["array", "null"], "items": {"type": "string"}}

JOB: Schema = {
    "type": "object",
    "properties": {
        "schema_version": _NUMBER, "job": _TEXT, "session": _TEXT, "command": _WORDS, "folder": _TEXT, "options": _WORDS, "policy": _TEXT, "daemon": _TEXT,
        "network": _TEXT, "host": _TEXT, "resume": _TEXT, "started": _TEXT, "ended": _TEXT, "exit_code": _NUMBER, "exit_reason": _TEXT,
        "world_size": _NUMBER, "ranks_reported": _NUMBER,
        "versions": {"type": ["object", "null"]},
        "scheduler": {"type": ["object", "null"]},
        "end": {
            "type": ["object", "null"],
            "properties": {
                "stopped_by_us": {"type": "boolean"}, "ranks_expected": _NUMBER, "steps": {"type": ["integer", "null"]}, "told": {"type": "boolean"},
                "began_at_update": _NUMBER, "updates": _NUMBER,
                "unused_resume": _TEXT, "left_behind": {"type": "array", "items": {"type": "integer"}}, "replays": {"type": "string"},
                "recorded_by": _TEXT, "restores": {"type": "boolean"},
            },
        },
    },
}  # fmt: skip

_BOUNDED: Schema = {
    "type": "object",
    "properties": {
        "key": _TEXT, "expression": _TEXT, "op": _TEXT, "module": _TEXT, "source": _TEXT, "kind": _TEXT, "why": _TEXT,
        "bound": {"type": ["object", "null"], "properties": {"ignored": {"type": ["array", "null"]}}},
    },
}  # fmt: skip
CONTRACT: Schema = {
    "type": "object",
    "properties": {"guarded": {"type": ["array", "null"], "items": _BOUNDED}, "opaque": {"type": ["array", "null"], "items": _BOUNDED}},
}


def object_of(text: str, schema: Schema) -> dict[str, Any] | None:
    """The JSON object in `text`; None where it is another thing, or of other types than `schema` says."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and fits(value, schema) else None


def fits(value: object, schema: Schema) -> bool:
    """Whether every value that is there has the type that the schema gives it."""
    if "type" in schema and not _is_of(value, schema["type"]):
        return False
    if isinstance(value, dict):
        known: Mapping[str, Schema] = schema.get("properties", {})
        return all(fits(value[name], part) for name, part in known.items() if name in value)
    return not isinstance(value, list) or all(fits(item, schema.get("items", {})) for item in value)


@functools.cache
def incident_schema() -> Schema:
    """The agreed form of incident.json."""
    text = importlib.resources.files("torch_watchdog_proto").joinpath("incident.schema.json").read_text(encoding="utf-8")
    found: Schema = json.loads(text)
    return found


def _is_of(value: object, names: str | list[str]) -> bool:
    allowed = [kind for name in ([names] if isinstance(names, str) else names) for kind in _TYPES[name]]
    return isinstance(value, tuple(allowed)) and (not isinstance(value, bool) or bool in allowed)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
