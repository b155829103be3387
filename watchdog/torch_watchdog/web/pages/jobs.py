"""The first page: every job of this daemon."""

from __future__ import annotations

from html import escape

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from torch_watchdog_proto.envelopes import JobStatus

__all__ = ["page"]

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>torch-watchdog</title></head>
<body><main><h1>Jobs</h1><table><tr><th>job<th>state<th>ranks<th>policy<th>incidents<th>exit</tr>{rows}</table></main></body></html>"""


async def page(request: Request) -> Response:
    return HTMLResponse(_PAGE.format(rows="".join(map(_row, request.app.state.view.jobs()))))


def _row(job: JobStatus) -> str:
    cells = (job.job, job.state, job.world_size or "", job.policy, job.incidents, "" if job.exit_code is None else job.exit_code)
    return "<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in cells) + "</tr>"
