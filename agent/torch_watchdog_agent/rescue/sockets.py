"""The connections of this process's gloo groups, so that a rank that waits in one of their collectives can be freed.

gloo itself has no way: aborting, destroying and shutting down its groups return at once and free nobody until the peer's process ends. Shutting down
the rank's own connections ends its wait with an error. Owns the list of those connections: what appears while a group is made, and is polled by the
same epoll as a listening socket, as gloo has it. Knows no torch: a socket of the job's store, or one that another thread of the user's opens in the
same moment, is never touched.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["made_here", "shut_down_all"]

_known: dict[int, int] = {}  # descriptor -> inode: the number may have been given to another file since


@contextmanager
def made_here() -> Iterator[None]:
    """The connections that appear while the body makes a process group are that group's."""
    before = _sockets()
    try:
        yield
    finally:
        polled = _polled_beside_a_listener()
        new = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}
        _known.update({fd: inode for fd, inode in new.items() if fd in polled and _is_of_a_group(fd)})


def shut_down_all() -> int:
    """Ends every wait in a collective of this process, with an error. The number of connections that were shut down."""
    count = 0
    for fd, inode in _known.items():
        with suppress(OSError), _opened(fd, inode) as connection:
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def _sockets() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers are wanted, not paths
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _polled_beside_a_listener() -> set[int]:
    """Each of gloo's devices has one loop: its epoll holds the socket that peers connect to and every connection. A client's has no listener in it."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers are wanted, not paths
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":  # noqa: PTH115
                polled = [
                    int(line.split()[1]) for line in Path(f"/proc/self/fdinfo/{name}").read_text().splitlines() if line.startswith("tfd:")
                ]
                found.update(polled if any(map(_listens, polled)) else ())
    return found


def _listens(fd: int) -> bool:
    with suppress(OSError), _opened(fd, os.fstat(fd).st_ino) as connection:
        return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _is_of_a_group(fd: int) -> bool:
    """Connected, over TCP, and not the store's line."""
    with suppress(OSError), _opened(fd, os.fstat(fd).st_ino) as connection:
        store_port = int(os.environ.get("MASTER_PORT") or 0)
        ports = {connection.getsockname()[1], connection.getpeername()[1]}
        return connection.type == socket.SOCK_STREAM and store_port not in ports
    return False


@contextmanager
def _opened(fd: int, inode: int) -> Iterator[socket.socket]:
    """Raises OSError where the number stands for something else by now."""
    if os.fstat(fd).st_ino != inode:
        raise OSError(f"descriptor {fd} is another socket by now")
    with socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError(f"descriptor {fd} is no network connection")
        yield connection
