"""The first page: every job of this daemon."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from torch_watchdog.launch.survivors import state_told
from torch_watchdog.web.pages.shown import render

__all__ = ["page"]


async def page(request: Request) -> Response:
    view = request.app.state.view
    past = await view.past_jobs()
    jobs = [*view.jobs(), *past.jobs]
    rows = [(job, state_told(job), f"{datetime.fromtimestamp(job.started_s, UTC):%m-%d %H:%M}" if job.started_s else "") for job in jobs]
    return render(request, "jobs.html", rows=rows, older=past.older, is_earlier=past.is_earlier)
