"""What to do about a kind of incident: a page for browsers, as alerts link to it, and its text for everybody else."""

from __future__ import annotations

import importlib.resources

from markdown_it import MarkdownIt
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from torch_watchdog.web.pages.shown import render

__all__ = ["page"]


async def page(request: Request) -> Response:
    known = {path.name: path for path in importlib.resources.files("torch_watchdog").joinpath("runbooks").iterdir()}
    kind = request.path_params["kind"]
    found = known.get(f"{kind}.md")
    if found is None:
        return PlainTextResponse("no such kind\n", status_code=404)
    text = found.read_text(encoding="utf-8")
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(text)
    return render(request, "runbook.html", kind=kind, text=Markup(MarkdownIt("commonmark", {"html": False}).render(text)))  # noqa: S704 - our own text
