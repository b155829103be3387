"""START HERE for the web: every path that the daemon answers over HTTP.

Owns the table of routes and the login. Pages are added in `pages/`, JSON in `api.py`; each endpoint finds the daemon in `request.app.state.view`.
"""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from torch_watchdog.daemon.view import FleetView
from torch_watchdog.errors import UnknownJobError
from torch_watchdog.web import api, pages
from torch_watchdog.web.access import Access
from torch_watchdog.web.guard import COOKIE, Guard, cookie_of
from torch_watchdog.web.metrics import exposition
from torch_watchdog.web.pages.live import Heat
from torch_watchdog.web.pages.shown import render

__all__ = ["make_app"]


def make_app(view: FleetView, access: Access, *, tls: bool) -> Starlette:
    """The application; nothing runs yet."""

    def refused(why: str) -> None:
        view.counters.refused_calls[why] += 1

    app = Starlette(
        routes=[
            Route("/healthz", _healthz),
            Route("/readyz", _readyz),
            Route("/metrics", _metrics),
            Route("/favicon.ico", _no_icon),
            Route("/apple-touch-icon{variant:path}", _no_icon),
            Route("/robots.txt", _no_robots),
            Route("/login", _show_login),
            Route("/login", _login, methods=["POST"]),
            Route("/logout", _logout, methods=["POST"]),
            *api.routes(),
            *pages.routes(),
        ],
        middleware=[Middleware(Guard, access=access, refused=refused, tls=tls)],
    )
    app.state.view, app.state.access, app.state.tls, app.state.heat = view, access, tls, Heat(view)
    return app


async def _healthz(_: Request) -> Response:
    """Answering is what it says."""
    return PlainTextResponse("ok\n")


async def _readyz(request: Request) -> Response:
    problem = request.app.state.view.ready()
    return PlainTextResponse("ok\n") if problem is None else PlainTextResponse(f"{problem}\n", status_code=503)


async def _metrics(request: Request) -> Response:
    try:
        text, kind = exposition(
            request.app.state.view,
            accept=request.headers.get("accept", ""),
            ranks_of=request.query_params.get("ranks"),
        )
    except UnknownJobError as error:
        return JSONResponse({"error": str(error)}, status_code=404)
    return Response(text, media_type=kind)


async def _no_icon(_: Request) -> Response:
    """Browsers and phones ask for one beside pages that name none, such as a runbook."""
    return Response(status_code=204)


async def _no_robots(_: Request) -> Response:
    return PlainTextResponse("User-agent: *\nDisallow: /\n")


async def _show_login(request: Request) -> Response:
    """With a token in the address, as a launch on a terminal prints it, the browser is let in at once."""
    token = request.query_params.get("token")
    return render(request, "login.html", problem="") if token is None else _let_in(request, token)


async def _login(request: Request) -> Response:
    body = (await request.body()).decode("utf-8", "replace")
    return _let_in(request, parse_qs(body).get("token", [""])[0].strip())


def _let_in(request: Request, token: str) -> Response:
    secret = request.app.state.access.begin_session(token)
    if secret is None:
        request.app.state.view.counters.refused_calls["http_wrong_token"] += 1
        return render(request, "login.html", status_code=403, problem="That is not the token of this daemon.")
    answer = RedirectResponse(_next(request), status_code=303)
    answer.set_cookie(COOKIE, secret, httponly=True, secure=request.app.state.tls, samesite="strict", path="/")
    return answer


def _next(request: Request) -> str:
    """A path of ours, whatever the link said."""
    wanted = urlsplit(request.query_params.get("next", "/"))
    is_ours = not wanted.scheme and not wanted.netloc and wanted.path.startswith("/") and not wanted.path.startswith(("//", "/\\"))
    return wanted.path if is_ours else "/"


async def _logout(request: Request) -> Response:
    request.app.state.access.end_session(cookie_of(request.headers))
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(COOKIE)
    return answer
