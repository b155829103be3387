"""One job: what it is doing, its map of ranks and time, its incidents, and what an operator may ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from torch_watchdog.errors import WatchdogError
from torch_watchdog.report.last_words import last_words
from torch_watchdog.store.read import read_job
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog.web.heat import METRICS
from torch_watchdog.web.pages import past
from torch_watchdog.web.pages.shown import answering, render
from torch_watchdog_proto.envelopes import ORDER_KINDS

__all__ = ["order", "page"]

_SHOWN_INCIDENTS = 50


@answering
async def page(request: Request) -> Response:
    view, name = request.app.state.view, request.path_params["job"]
    if not view.is_live(name):
        return await past.page(request, await view.past_job(name))
    job, incidents = view.job(name), list(view.incidents(name))
    words = await view.disk.read(lambda: _words(view.run_dir(name), incidents)) if job.state == "ended" else []
    return render(
        request, "job.html", job=job, words=words, incidents=incidents[::-1][:_SHOWN_INCIDENTS], metrics=METRICS,
        summary=request.app.state.heat.summary(name),
    )  # fmt: skip


def _words(run_dir: Path, incidents: Sequence[Mapping[str, Any]]) -> list[str]:
    """A launch that has its own daemon writes its end after the last report: then they come with the next look."""
    try:
        return last_words(RunDirectory(run_dir), read_job(run_dir), incidents, here="")
    except WatchdogError:
        return []


@answering
async def order(request: Request) -> Response:
    """From a form; the page then says what came of it."""
    name = request.path_params["job"]
    kind = parse_qs((await request.body()).decode("utf-8", "replace")).get("kind", [""])[0]
    if kind in ORDER_KINDS:
        answer = await request.app.state.view.request_order(
            name, kind, by="an operator on the page", reason="asked for on the page", who=request.state.who
        )
        said = answer.text if answer.accepted else f"not now: {answer.text}"
    else:
        said = "there is no such order"
    return RedirectResponse(f"/jobs/{quote(name)}?said={quote(said)}", status_code=303)
