"""Where the daemon listens: unix sockets that only this user can reach, and loopback.

Owns addresses and gRPC server options; knows no service. Anything off this host is refused: that needs TLS, which is not there yet.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import grpc

from torch_watchdog.daemon.address import is_loopback, split
from torch_watchdog.errors import DaemonStartError

__all__ = ["bind", "new_server"]

_MAX_ANSWER_BYTES = 64 << 20
_MAX_UNIX_PATH_BYTES = 107  # of sockaddr_un


def new_server(max_message_bytes: int) -> Any:
    """A server without services and ports."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", _MAX_ANSWER_BYTES),
        ("grpc.so_reuseport", 0),  # a second daemon on one port must fail, not share it
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]
    return grpc.aio.server(options=options)


def bind(server: Any, address: str, *, has_token: bool) -> str:
    """Adds the address; returns it with its real port. Raises DaemonStartError, also for a port that would ask nobody for a token."""
    path = address.removeprefix("unix:")
    return _bind_unix(server, Path(path)) if path != address else _bind_loopback(server, address, has_token)


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


def _bind_loopback(server: Any, address: str, has_token: bool) -> str:
    host, port = split(address)
    if not port:
        raise DaemonStartError(address, "this is no address", "Write 127.0.0.1:PORT or unix:PATH")
    if not is_loopback(host):
        raise DaemonStartError(
            address, "this version listens on this host only, for want of TLS between hosts",
            "Listen on 127.0.0.1:PORT and reach it through `ssh -L PORT:127.0.0.1:PORT HOST`",
        )  # fmt: skip
    if not has_token:
        raise DaemonStartError(address, "every user of this machine could stop jobs through it", "Give the daemon a token")
    return f"{address.removesuffix(port)}{_add_port(server, address, 'Is another daemon there? Pass another port, or 0 for any')}"


def _add_port(server: Any, address: str, advice: str) -> int:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise DaemonStartError(address, str(error), advice) from error
    if not port:
        raise DaemonStartError(address, "it could not be bound", advice)
    return int(port)
