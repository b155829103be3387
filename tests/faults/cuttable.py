"""A TCP line that can be cut, mended and slowed: what lies between a node and its daemon in a trial."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

__all__ = ["Line"]


class Line:
    """Passes connections to `127.0.0.1:target`; `delay_s` is added to every piece that comes."""

    def __init__(self, target: int) -> None:
        self._target, self._is_cut, self.delay_s = target, False, 0.0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._ends: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """All that go through it now are reset, and until `mend` new ones too."""
        self._is_cut = True
        with self._lock:
            ends, self._ends = self._ends, set()
        for end in ends:
            _close(end)

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                try:
                    if self._is_cut:
                        raise OSError("cut")
                    target = socket.create_connection(("127.0.0.1", self._target), timeout=5)
                    target.settimeout(None)
                except OSError:
                    _close(caller)
                    continue
                with self._lock:
                    self._ends |= {caller, target}
                for source, sink in ((caller, target), (target, caller)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay_s:
                    time.sleep(self.delay_s)
                sink.sendall(data)
        for end in (source, sink):
            _close(end)
        with self._lock:
            self._ends -= {source, sink}


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
