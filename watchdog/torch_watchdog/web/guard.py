"""What stands before every page: who is asking, what a request may weigh, and the headers that every answer carries.

Owns the door; knows nothing of what lies behind it. A browser's session acts only for pages of this very site (Origin, SameSite), so another site
cannot make it stop a job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response

from torch_watchdog.web.access import Access, Role

__all__ = ["COOKIE", "OPEN", "Guard"]

COOKIE = "torch-watchdog-session"
# They ask for no token, and tell nothing of any job.
OPEN = ("/healthz", "/readyz", "/login", "/favicon.ico", "/apple-touch-icon", "/robots.txt", "/static/", "/runbooks/")
_FOR_PROGRAMS = ("/api/", "/metrics")  # of which some say that they take HTML, and would take a login page for an answer
_MAX_BODY_BYTES = 64 << 10
_READS = ("GET", "HEAD")
_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'self'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer a browser says "Origin: null" for the forms of our own pages, too
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI middleware. Behind it `request.state.role` is the caller's Role, None on an open path."""

    def __init__(self, app: App, *, access: Access, refused: Callable[[str], None], tls: bool) -> None:
        self._app, self._access, self._refused = app, access, refused
        self._headers = _HEADERS | ({"strict-transport-security": "max-age=31536000"} if tls else {})

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = self._with_headers(send)
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["role"], state["who"] = role, _ = self._caller(headers)
        refusal = self._refusal(scope, headers, role)
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, _bounded(receive), send)

    def _refusal(self, scope: Mapping[str, Any], headers: Headers, role: Role | None) -> Response | None:
        reads = scope["method"] in _READS
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            return self._refuse("too_large", 413, f"a request may carry {_MAX_BODY_BYTES} bytes")
        if not reads and not _is_of_this_site(headers):
            return self._refuse("cross_site", 403, "this request came from another site's page")
        if scope["path"].startswith(OPEN):
            return None
        if role is None:
            return self._ask_for_token(scope, headers)
        if not reads and role < Role.OPERATOR:
            return self._refuse("role", 403, "this token may look, and not give orders: use one with the role operator")
        return None

    def _ask_for_token(self, scope: Mapping[str, Any], headers: Headers) -> Response:
        is_page = not scope["path"].startswith(_FOR_PROGRAMS)
        if is_page and "text/html" in headers.get("accept", ""):
            there = f"?next={quote(scope['path'])}" if scope["method"] in _READS else ""
            return RedirectResponse(f"/login{there}", status_code=303)
        refusal = self._refuse("no_token", 401, "send the daemon's token: `Authorization: Bearer TOKEN`")
        refusal.headers["www-authenticate"] = "Bearer"
        return refusal

    def _refuse(self, why: str, status: int, text: str) -> Response:
        self._refused(f"http_{why}")
        return JSONResponse({"error": text}, status_code=status)

    def _caller(self, headers: Headers) -> tuple[Role | None, str]:
        """What it may do, and the name of its token."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._access.role_of_token(token.strip()), self._access.name_of_token(token.strip())
        secret = cookie_of(headers)
        return (self._access.role_of_session(secret), self._access.name_of_session(secret)) if secret else (None, "")

    def _with_headers(self, send: Send) -> Send:
        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        return with_headers


def cookie_of(headers: Headers) -> str:
    """The session's secret, empty where there is none."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _is_of_this_site(headers: Headers) -> bool:
    """A program sends neither header, a browser always one of them."""
    origin = headers.get("origin")
    same = origin is None or origin.partition("://")[2] == headers.get("host")
    return same and headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


def _bounded(receive: Receive) -> Receive:
    """A body without a length is bounded too."""
    size = 0

    async def bounded() -> MutableMapping[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        return message if size <= _MAX_BODY_BYTES else {"type": "http.disconnect"}

    return bounded
