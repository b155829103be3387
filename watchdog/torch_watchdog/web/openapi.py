"""The OpenAPI document of the JSON API, made from its table of operations and from the dataclasses and the schema that its objects follow.

Pure: operations in, a JSON object out.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from torch_watchdog.alerts.alert import Alert
from torch_watchdog.store.shapes import incident_schema
from torch_watchdog_proto import __version__
from torch_watchdog_proto.envelopes import ORDER_KINDS, JobStatus, OrderAnswer, RankStatus

__all__ = ["Operation", "Parameter", "document"]

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a path or a query."""

    name: str
    place: Literal["path", "query"]
    kind: Literal["string", "integer"]
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One path and method; `answer` and `body` name schemas of the document."""

    method: Literal["GET", "POST"]
    path: str
    endpoint: Callable[[Any], Awaitable[Any]]
    summary: str
    answer: str
    parameters: tuple[Parameter, ...] = ()
    body: str | None = None
    status: int = 200


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1, whose schemas are JSON Schema as they are."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "torch-watchdog", "version": __version__, "description": "Jobs, incidents and events of one daemon."},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    refusals = {"400": "a parameter or the body is not what it must be", "401": "no token", "403": "the token's role does not suffice"}
    refusals |= {"404": "no such job or incident"} if operation.parameters else {}
    refusals |= {"409": "the job did not take the order"} if operation.body else {}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [
            {"name": one.name, "in": one.place, "required": one.place == "path", "schema": {"type": one.kind}, "description": one.text}
            for one in operation.parameters
        ],
        "responses": {
            str(operation.status): {"description": operation.summary, "content": _json(operation.answer)},
            **{status: {"description": text, "content": _json("Problem")} for status, text in refusals.items()},
        },
    }
    return described | ({"requestBody": {"required": True, "content": _json(operation.body)}} if operation.body else {})


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _schemas() -> dict[str, Any]:
    job = _of_dataclass(JobStatus, {"ranks": {"type": "array", "items": _ref("RankStatus")}})
    brief = {name: value for name, value in job["properties"].items() if name != "ranks"}
    event: dict[str, Any] = {
        "time": {"type": "string"},
        "order": {"type": "integer"},
        "attempt": {"type": "integer"},
        "kind": {"type": "string"},
    }
    event |= {"rank": {"type": ["integer", "null"]}, "step": {"type": ["integer", "null"]}, "text": {"type": "string"}}
    order: dict[str, Any] = {"kind": {"enum": list(ORDER_KINDS)}, "reason": {"type": "string"}, "by": {"type": "string"}}
    return {
        "Job": job,
        "RankStatus": _of_dataclass(RankStatus, {"loss": {"type": ["number", "string", "null"]}}),
        "Jobs": _object({"jobs": {"type": "array", "items": _object(brief)}}),
        "Incident": _incident_schema(),
        "Incidents": _object({"incidents": {"type": "array", "items": _ref("Incident")}}),
        "Events": _object({"events": {"type": "array", "items": _object(event)}}),
        "Order": {"type": "object", "required": ["kind"], "properties": order},
        "OrderAnswer": _of_dataclass(OrderAnswer, {}),
        "Alerts": _object(
            {"alerts": {"type": "array", "items": _alert_schema()}, "silences": {"type": "array", "items": {"type": "object"}}}
        ),
        "Acknowledgement": _object({"incident": {"type": "string"}}),
        "Problem": _object({"error": {"type": "string"}}),
        "Document": {"type": "object"},
    }


def _alert_schema() -> dict[str, Any]:
    return _of_dataclass(Alert, {"name": {"type": "string"}})


def _incident_schema() -> dict[str, Any]:
    return {name: value for name, value in incident_schema().items() if name != "$schema"}


def _of_dataclass(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return _object({field.name: given.get(field.name) or _of_type(hints[field.name]) for field in dataclasses.fields(kind)})


def _of_type(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _of_type(arguments[0])}
    if origin in (types.UnionType, typing.Union):
        return {"type": [_PLAIN[argument] for argument in arguments]}
    return {"type": _PLAIN[hint]}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": dict(properties)}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
