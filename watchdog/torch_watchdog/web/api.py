"""The JSON API: what `--json` of the command line shows, over HTTP, with an OpenAPI document that is made from the same table.

Owns paths and status codes. The objects are those of the daemon (JobStatus, incident.json, events.jsonl); nothing is reshaped here.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torch_watchdog.daemon.grants import told_as
from torch_watchdog.daemon.view import FleetView
from torch_watchdog.errors import DiskAwayError, UnknownJobError
from torch_watchdog.launch.survivors import UnansweredStatus
from torch_watchdog.web.openapi import Operation, Parameter, document
from torch_watchdog_proto.envelopes import ORDER_KINDS, JobStatus, OrderKind, RankStatus

__all__ = ["OPERATIONS", "routes"]

_MAX_EVENTS = 1_000


async def _jobs(request: Request) -> Response:
    view = _view(request)
    past = await view.past_jobs()
    return JSONResponse({"jobs": [_without_ranks(status) for status in (*view.jobs(), *past.jobs)]})


async def _job(request: Request) -> Response:
    view, name = _view(request), request.path_params["job"]
    status = await view.any_job(name)
    return JSONResponse(_without_ranks(status) | {"ranks": [_fields(rank) for rank in status.ranks]})


async def _incidents(request: Request) -> Response:
    return JSONResponse({"incidents": list(await _incidents_of(request))})


async def _incidents_of(request: Request) -> Sequence[Mapping[str, Any]]:
    return await _view(request).any_incidents(request.path_params["job"])


async def _incident(request: Request) -> Response:
    number = request.path_params["incident"]
    found = next((one for one in await _incidents_of(request) if one["id"] == number), None)
    return JSONResponse(found) if found is not None else _problem(404, f"the job has no incident {number[:40]!r}")


async def _events(request: Request) -> Response:
    after, limit = _number(request, "after", 0), min(_number(request, "limit", 100), _MAX_EVENTS)
    found = await _view(request).events(request.path_params["job"])
    return JSONResponse({"events": [event for event in found if event.get("order", 0) > after][:limit]})


async def _order(request: Request) -> Response:
    wanted = await _object(request)
    if wanted.get("kind") not in ORDER_KINDS:
        return _problem(400, f"`kind` must be one of {', '.join(ORDER_KINDS)}")
    by, reason = str(wanted.get("by") or "a caller of the API"), str(wanted.get("reason") or "")
    answer = await _view(request).request_order(
        request.path_params["job"], cast("OrderKind", wanted["kind"]), by=by, reason=reason, who=request.state.who
    )
    return JSONResponse(dataclasses.asdict(answer), status_code=202 if answer.accepted else 409)


async def _alerts(request: Request) -> Response:
    alerting = _view(request).alerting
    found = ([], []) if alerting is None else (alerting.listed(), alerting.silences())
    return JSONResponse(dict(zip(("alerts", "silences"), found, strict=True)))


async def _acknowledge(request: Request) -> Response:
    wanted = await _object(request)
    alerting, name, by = _view(request).alerting, str(wanted.get("incident") or ""), str(wanted.get("by") or "a caller of the API")
    taken = alerting is not None and alerting.acknowledge(name, told_as(request.state.who, by)[:200])
    _view(request).note("acknowledgement", name, who=request.state.who, says=by, accepted=taken)
    text = f"{name} is yours" if taken else f"no open alert is called {name[:120]!r}"
    return JSONResponse({"accepted": taken, "text": text}, status_code=202 if taken else 409)


async def _document(_: Request) -> Response:
    return JSONResponse(document(OPERATIONS))


_JOB = Parameter("job", "path", "string", "the job's name")
OPERATIONS = (
    Operation("GET", "/api/v1/jobs", _jobs, "Every job of this daemon, newest first, without its ranks; then those that ended before it began", "Jobs"),
    Operation("GET", "/api/v1/jobs/{job}", _job, "One job and its ranks", "Job", (_JOB,)),
    Operation("GET", "/api/v1/jobs/{job}/incidents", _incidents, "The job's incidents, oldest first", "Incidents", (_JOB,)),
    Operation(
        "GET", "/api/v1/jobs/{job}/incidents/{incident}", _incident, "One incident", "Incident",
        (_JOB, Parameter("incident", "path", "string", "the incident's number in its job")),
    ),
    Operation(
        "GET", "/api/v1/jobs/{job}/events", _events, "What the daemon saw, decided and why, oldest first", "Events",
        (
            _JOB,
            Parameter("after", "query", "integer", "only events whose `order` is greater: the last one of the page before"),
            Parameter("limit", "query", "integer", f"at most so many (default 100, at most {_MAX_EVENTS})"),
        ),
    ),
    Operation("POST", "/api/v1/jobs/{job}/orders", _order, "Ask the job for a clean stop or a checkpoint", "OrderAnswer", (_JOB,), "Order", 202),
    Operation("GET", "/api/v1/alerts", _alerts, "The alerts that are open, and what is kept quiet", "Alerts"),
    Operation("POST", "/api/v1/alerts/acknowledge", _acknowledge, "Say that an alert is yours", "OrderAnswer", (), "Acknowledgement", 202),
    Operation("GET", "/api/v1/openapi.json", _document, "This document", "Document"),
)  # fmt: skip


def routes() -> list[Route]:
    return [Route(operation.path, _answering(operation.endpoint), methods=[operation.method]) for operation in OPERATIONS]


def _answering(endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Our own errors become a status with their sentence."""

    async def answer(request: Request) -> Response:
        try:
            return cast("Response", await endpoint(request))
        except UnknownJobError as error:
            return _problem(404, str(error))
        except DiskAwayError as error:
            return _problem(503, str(error))
        except _BadRequestError as error:
            return _problem(400, str(error))

    return answer


class _BadRequestError(Exception):
    """The caller's mistake, in words."""


async def _object(request: Request) -> dict[str, Any]:
    try:
        value = json.loads(await request.body())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _BadRequestError("the body must be one JSON object")
    return value


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise _BadRequestError(f"`{name}` must be a whole number, 0 or more")
    return int(text)


def _without_ranks(status: JobStatus) -> dict[str, Any]:
    """Of a launch that has written no end with what is known of that, as `watchdog jobs --json` has it."""
    more = {"problem": status.problem, "unwatched": status.unwatched} if isinstance(status, UnansweredStatus) else {}
    return {name: value for name, value in _fields(status).items() if name != "ranks"} | more


def _fields(status: JobStatus | RankStatus) -> dict[str, Any]:
    """As they are: `asdict` copies each, a fifth of a second for 16,384 ranks, in which an order waits. A loss that is no number is a word, as everywhere."""
    fields = {name: getattr(status, name) for name in (JobStatus if isinstance(status, JobStatus) else RankStatus).__slots__}
    if (loss := fields.get("loss")) is not None and not math.isfinite(loss):
        fields["loss"] = str(loss)
    return fields


def _problem(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status_code=status)


def _view(request: Request) -> FleetView:
    return cast("FleetView", request.app.state.view)
