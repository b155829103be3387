"""The pages for people. One module a page; each adds its routes here.

An endpoint finds the daemon in `request.app.state.view` (a FleetView) and the caller's role in `request.state.role`.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from torch_watchdog.web.pages import jobs

__all__ = ["routes"]


def routes() -> list[BaseRoute]:
    return [Route("/", jobs.page)]
