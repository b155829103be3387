"""The HTTP server, on the daemon's own loop.

Owns the socket and its limits: how many may be connected, how long a request may take to arrive. Off this host it speaks TLS or not at all. Knows
nothing of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torch_watchdog.daemon.renewal import Renewal
from torch_watchdog.errors import DaemonStartError
from torch_watchdog_proto.address import is_loopback, split

__all__ = ["serving_web"]

_MAX_CONNECTIONS = 256
_MAX_HEAD_BYTES = 16 << 10
_KEEP_ALIVE_S = 30
_BACKLOG = 128
_STOP_S = 1
_LOOK_FOR_RENEWAL_S = 5.0


@contextlib.asynccontextmanager
async def serving_web(app: Any, address: str, *, request_s: float, renewal: Renewal | None = None) -> AsyncIterator[str]:
    """Serves at HOST:PORT; gives the URL with its real port. A request must arrive whole within `request_s`. Raises DaemonStartError."""
    listener = _listen(address, is_safe=renewal is not None)
    server = uvicorn.Server(_config(app, request_s, renewal))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    renewing = None if renewal is None else asyncio.create_task(_renewed(server.config, renewal))
    try:
        yield f"{'http' if renewal is None else 'https'}://{address.rpartition(':')[0]}:{listener.getsockname()[1]}/"
    finally:
        if renewing is not None:
            renewing.cancel()
        server.should_exit = True
        await asyncio.wait((task,), timeout=_STOP_S + 2.0)
        task.cancel()
        listener.close()


async def _renewed(config: uvicorn.Config, renewal: Renewal) -> None:
    """The context that the listener has takes the new pair, for every connection from then on."""
    version = renewal.version
    while True:
        await asyncio.sleep(_LOOK_FOR_RENEWAL_S)
        before, version = version, renewal.look()
        if version != before and config.ssl is not None:
            with contextlib.suppress(OSError):  # renewed again at this moment: the next look finds that
                renewal.load_into(config.ssl)


def _config(app: Any, request_s: float, renewal: Renewal | None) -> uvicorn.Config:
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # paths and addresses of callers are nobody's business on the terminal
    protocol = type("Impatient", (_ImpatientProtocol,), {"request_s": request_s})
    return uvicorn.Config(
        app, http=protocol, ws="none", lifespan="off", loop="none", log_config=None, access_log=False, server_header=False,
        date_header=True, limit_concurrency=_MAX_CONNECTIONS, timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_STOP_S,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES, proxy_headers=False, backlog=_BACKLOG, **_tls(renewal),
    )  # fmt: skip


def _tls(renewal: Renewal | None) -> dict[str, Any]:
    return {} if renewal is None else {"ssl_certfile": str(renewal.certificate_file), "ssl_keyfile": str(renewal.key_file)}


def _listen(address: str, *, is_safe: bool) -> socket.socket:
    host, port = split(address)
    if not port:
        raise DaemonStartError(address, "this is no address", "Write --web HOST:PORT")
    if not is_loopback(host) and not is_safe:
        advice = "Pass --web 127.0.0.1:PORT, or --cert and --key (`watchdog certs` makes them)"
        raise DaemonStartError(address, "off this host the page needs TLS, and there is none", advice)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # without its name asyncio leaves Nagle on: 40 ms an answer
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(_BACKLOG)  # before its URL is told: who calls at once waits, where it was refused
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        raise DaemonStartError(address, f"it could not be bound ({error})", "Is another daemon there? Pass another --web") from error
    return listener


class _ImpatientProtocol(H11Protocol):
    """Ends a connection whose request does not arrive in time: uvicorn itself waits for ever for a caller who sends a byte a minute."""

    request_s: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()
        elif self._timer is None:
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def _wait_for_request(self) -> None:
        self._timer = self.loop.call_later(self.request_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self._is_answering() and not self.transport.is_closing():
            self.transport.close()
