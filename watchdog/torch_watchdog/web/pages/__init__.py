"""The pages for people. One module a page; each adds its routes here.

An endpoint finds the daemon in `request.app.state.view` (a FleetView), the maps of its jobs in `request.app.state.heat`, and the caller's role in
`request.state.role`. Everything works without scripts but the map and the live figures.
"""

from __future__ import annotations

from pathlib import Path

from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from torch_watchdog.web.pages import incident, job, jobs, live, rank, runbook

__all__ = ["routes"]

_STATIC = Path(__file__).parent.parent / "static"


def routes() -> list[BaseRoute]:
    return [
        Route("/", jobs.page),
        Route("/jobs/{job}", job.page),
        Route("/jobs/{job}/orders", job.order, methods=["POST"]),
        Route("/jobs/{job}/heat", live.heat),
        Route("/jobs/{job}/live", live.stream),
        Route("/jobs/{job}/incidents/{incident}", incident.page),
        Route("/jobs/{job}/incidents/{incident}/acknowledge", incident.acknowledge, methods=["POST"]),
        Route("/jobs/{job}/ranks/{rank:int}", rank.page),
        Route("/runbooks/{kind}", runbook.page),
        Mount("/static", StaticFiles(directory=_STATIC)),
    ]
