"""One incident: its facts, and an operator's word that it is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from torch_watchdog.report.story import facts_of
from torch_watchdog.web.pages.shown import answering, not_found, render

__all__ = ["acknowledge", "page"]

_TOLD_ABOVE = ("kind", "allowed")  # the title, and the line of what offends


@answering
async def page(request: Request) -> Response:
    job, found = request.path_params["job"], await _found(request)
    if found is None:
        return not_found(request, f"Job {job} has no such incident.")
    facts = {name: text for name, text in facts_of(found).items() if name not in _TOLD_ABOVE and text != found["summary"]}
    return render(request, "incident.html", job=job, incident=found, facts=facts, alert=_open_alert(request))


async def _found(request: Request) -> Mapping[str, Any] | None:
    view, job = request.app.state.view, request.path_params["job"]
    incidents = await view.any_incidents(job)
    return next((found for found in incidents if found["id"] == request.path_params["incident"]), None)


def _name(request: Request) -> str:
    return f"{request.path_params['job']}/{request.path_params['incident']}"


def _open_alert(request: Request) -> Mapping[str, Any] | None:
    """What is being told to somebody about it; None where nobody is told."""
    alerting = request.app.state.view.alerting
    return None if alerting is None else next((alert for alert in alerting.listed() if alert["name"] == _name(request)), None)


@answering
async def acknowledge(request: Request) -> Response:
    alerting = request.app.state.view.alerting
    taken = alerting is not None and alerting.acknowledge(_name(request), "an operator on the page")
    said = "it is yours: nobody else is told of it" if taken else "nobody is being told of it"
    job, number = quote(request.path_params["job"]), quote(request.path_params["incident"])
    return RedirectResponse(f"/jobs/{job}/incidents/{number}?said={quote(said)}", status_code=303)
