"""A daemon's certificate as its files have it now: who renews them need not start the daemon again.

Owns the two files' newest good contents. A pair that does not belong together, or cannot be read, is a renewal that is not finished: the one before
stays in use. Called from several threads.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable

from torch_watchdog.daemon.config import Certificate
from torch_watchdog.errors import DaemonStartError

__all__ = ["Renewal"]

_Stamp = tuple[tuple[int, int, int], ...]


class Renewal:
    """`key` and `chain` are PEM; `version` counts the pairs that have been in use. Raises DaemonStartError where there is no good pair to begin with."""

    def __init__(self, certificate: Certificate, *, say: Callable[[str], None]) -> None:
        self.certificate_file, self.key_file = certificate.certificate_file, certificate.key_file
        self._say, self._lock = say, threading.Lock()
        self._complained_of: _Stamp | None = None
        try:
            self._stamp = self._stamped()
            self.key, self.chain = self._read()
        except OSError as error:
            raise DaemonStartError(str(error.filename), f"it cannot be read ({error.strerror})", "Make it with `watchdog certs`") from error
        self.version = 1

    def look(self) -> int:
        """The version that is in use from now on: another one where both files have changed."""
        with self._lock:
            stamp: _Stamp | None = None
            try:
                stamp = self._stamped()
                if stamp != self._stamp:
                    key_and_chain = self._read()
                    self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
                    (self.key, self.chain), self._stamp = key_and_chain, stamp
                    self.version += 1
                    self._say(f"the certificate {self.certificate_file} was renewed and is in use")
            except OSError as error:  # ssl's own errors are OSErrors, too
                if stamp != self._complained_of:
                    self._say(f"the renewed certificate cannot be used ({error}): the one before stays in use")
                self._complained_of = stamp
            return self.version

    def load_into(self, context: ssl.SSLContext) -> None:
        """Raises OSError, also where key and certificate do not belong together."""
        context.load_cert_chain(self.certificate_file, self.key_file)

    def _stamped(self) -> _Stamp:
        found = (path.stat() for path in (self.key_file, self.certificate_file))
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    def _read(self) -> tuple[bytes, bytes]:
        return self.key_file.read_bytes(), self.certificate_file.read_bytes()
