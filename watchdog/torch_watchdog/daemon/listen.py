"""Where the daemon listens: unix sockets that only this user can reach, loopback with a token, and off this host with TLS and a strong one.

Owns addresses and gRPC server options; knows no service.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import grpc

from torch_watchdog.daemon.renewal import Renewal
from torch_watchdog.errors import DaemonStartError
from torch_watchdog_proto import tls
from torch_watchdog_proto.address import split

__all__ = ["bind", "new_server"]

_MAX_ANSWER_BYTES = 64 << 20
_MAX_UNIX_PATH_BYTES = 107  # of sockaddr_un
_MAX_PENDING_CALLS = 32_768  # thousands of nodes begin in one moment; past its own 1,000 gRPC refuses calls at random


def new_server(max_message_bytes: int) -> Any:
    """A server without services and ports."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", _MAX_ANSWER_BYTES),
        ("grpc.so_reuseport", 0),  # a second daemon on one port must fail, not share it
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_time_ms", 10_000),  # a node that the network has lost must be seen as away
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
    ]
    return grpc.aio.server(options=options)


def bind(server: Any, address: str, *, token: str, renewal: Renewal | None = None) -> str:
    """Adds the address; returns it with its real port. Raises DaemonStartError, also for a port that would ask nobody for a token."""
    path = address.removeprefix("unix:")
    return _bind_unix(server, Path(path)) if path != address else _bind_port(server, address, token, renewal)


def _bind_unix(server: Any, path: Path) -> str:
    address = f"unix:{path}"
    if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
        raise DaemonStartError(address, f"a socket's path may have {_MAX_UNIX_PATH_BYTES} bytes", "Pass a shorter path")
    _check_private(path.parent, address)
    _add_port(server, address, "Is the folder writable?")
    path.chmod(0o600)
    return address


def _check_private(folder: Path, address: str) -> None:
    try:
        found = folder.stat()
    except OSError as error:
        raise DaemonStartError(address, f"its folder cannot be entered ({error.strerror})", "Make it first, with mode 0700") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise DaemonStartError(address, "others can enter its folder, and who reaches the socket may stop jobs", f"Run: chmod 700 {folder}")


def _bind_port(server: Any, address: str, token: str, renewal: Renewal | None) -> str:
    _, port = split(address)
    if not port:
        raise DaemonStartError(address, "this is no address", "Write HOST:PORT or unix:PATH")
    if not token:
        raise DaemonStartError(address, "everybody who reaches it could stop jobs through it", "Give the daemon a token")
    if tls.leaves_the_machine(address) and not tls.is_strong(token):
        raise DaemonStartError(
            address, f"its token has {len(token)} characters, and a port that other machines reach needs {tls.MIN_TOKEN_CHARACTERS} or more",
            'Make one with `python -c "import secrets; print(secrets.token_urlsafe(32))"` and give it to all',
        )  # fmt: skip
    return f"{address.removesuffix(port)}{_add_port(server, address, 'Is another daemon there? Pass another port, or 0 for any', token, renewal)}"


def _add_port(server: Any, address: str, advice: str, token: str = "", renewal: Renewal | None = None) -> int:
    try:
        secure = tls.leaves_the_machine(address)
        port = server.add_secure_port(address, _credentials(token, renewal)) if secure else server.add_insecure_port(address)
    except RuntimeError as error:  # its own words are advice for developers of gRPC
        raise DaemonStartError(address, "the port cannot be had", advice) from error
    if not port:
        raise DaemonStartError(address, "it could not be bound", advice)
    return int(port)


def _credentials(token: str, renewal: Renewal | None) -> Any:
    if renewal is None:
        return tls.server_credentials(token)
    version = renewal.version

    def fetch() -> Any:
        """Asked at each handshake; None: as before."""
        nonlocal version
        before, version = version, renewal.look()
        return None if version == before else grpc.ssl_server_certificate_configuration([(renewal.key, renewal.chain)])

    first = grpc.ssl_server_certificate_configuration([(renewal.key, renewal.chain)])
    return grpc.dynamic_ssl_server_credentials(first, fetch)
