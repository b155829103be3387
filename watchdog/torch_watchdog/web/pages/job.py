"""One job: what it is doing, its map of ranks and time, its incidents, and what an operator may ask of it."""

from __future__ import annotations

from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from torch_watchdog.web.heat import METRICS
from torch_watchdog.web.pages.shown import answering, render
from torch_watchdog_proto.envelopes import ORDER_KINDS

__all__ = ["order", "page"]

_SHOWN_INCIDENTS = 50


@answering
async def page(request: Request) -> Response:
    view, name = request.app.state.view, request.path_params["job"]
    return render(
        request, "job.html", job=view.job(name), incidents=list(view.incidents(name))[::-1][:_SHOWN_INCIDENTS], metrics=METRICS,
        summary=request.app.state.heat.summary(name),
    )  # fmt: skip


@answering
async def order(request: Request) -> Response:
    """From a form; the page then says what came of it."""
    name = request.path_params["job"]
    kind = parse_qs((await request.body()).decode("utf-8", "replace")).get("kind", [""])[0]
    if kind in ORDER_KINDS:
        answer = request.app.state.view.request_order(
            name, kind, by="an operator on the page", reason="asked for on the page", who=request.state.who
        )
        said = answer.text if answer.accepted else f"not now: {answer.text}"
    else:
        said = "there is no such order"
    return RedirectResponse(f"/jobs/{quote(name)}?said={quote(said)}", status_code=303)
