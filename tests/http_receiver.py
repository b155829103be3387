"""A real HTTP server that keeps what it is sent, and answers what a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

__all__ = ["HttpReceiver"]


class HttpReceiver:
    """`got` holds (path, body) in order; `status` is what it answers from now on. What `faults` finds in a body is answered with 400, and kept in `refused`."""

    def __init__(self, port: int = 0, *, faults: Callable[[Any], list[str]] = lambda _: []) -> None:
        self.got: list[tuple[str, Any]] = []
        self.refused: list[list[str]] = []
        self.status = 202
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))))
                wrong = faults(body)
                status = 400 if wrong else receiver.status
                if wrong:
                    receiver.refused.append(wrong)
                elif status < 300:
                    receiver.got.append((self.path, body))
                answer = json.dumps({"status": "success" if status < 300 else "not today"}).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bodies(self, **wanted: str) -> list[Any]:
        """What was sent, of those whose fields say so."""
        return [body for _, body in list(self.got) if all(body.get(name) == value for name, value in wanted.items())]
