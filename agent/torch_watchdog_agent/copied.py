"""A rank that has no keeper, but whose output is copied all the same: it keeps its pid, and a process of nobody's does the copying.

Owns that, the mark of a rank that is kept or copied already, and what a process that copies may hold open. Standard library only: it runs before
torch is imported, in every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

from torch_watchdog_agent.output import Tee, lift, open_tee, silence

if TYPE_CHECKING:  # what only annotations need is not paid for in every rank
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Say = Callable[[str], None]

__all__ = ["KEPT_MARK", "close_all_but", "give_up", "is_kept", "tee_only"]

KEPT_MARK = "TORCH_WATCHDOG_KEPT"  # "rank pid:keeper pid": a rank that executes itself anew is not kept, nor copied, twice
HIGH_FD = 700  # descriptors that a rank has to carry lie where no program counts
LAST_COPY_MS = 500


def tee_only(*, log_path: Path, say: Say) -> None:
    """Append what this process prints to `log_path` too; it keeps its pid, a process of nobody's does the copying. For ranks that lead no session."""
    if is_kept() or (tee := open_tee(log_path, say)) is None:
        return
    done_fd, held_fd = (lift(fd, HIGH_FD) for fd in os.pipe2(os.O_CLOEXEC))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        _fork_copier(tee, held_fd)
        os.close(held_fd)
        if os.read(done_fd, 1):
            _enter_copied(tee, done_fd)
        else:
            give_up(tee, (done_fd,))
            say("the output of this rank is not kept: no process could be forked for it")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def is_kept() -> bool:
    return os.environ.get(KEPT_MARK, "").partition(":")[0] == str(os.getpid())


def give_up(tee: Tee | None, fds: Iterable[int]) -> None:
    if tee is not None:
        tee.abandon()
    for fd in fds:
        os.close(fd)


def close_all_but(kept: set[int]) -> None:
    """Nothing that the rank closes may stay open here: its standard input, its sockets, what a launcher handed down."""
    for fd in {0, 1, 2} - kept:
        silence(fd)
    try:
        fds = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208 - numbers are wanted, not paths
    except OSError:
        return
    for fd in fds - kept - {0, 1, 2}:
        try:
            os.close(fd)
        except OSError:
            continue  # the listing's own


def _fork_copier(tee: Tee, held_fd: int) -> None:
    """A process of nobody's that copies to the end, says through `held_fd` that it is there, and holds it open meanwhile."""
    try:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            return
    except OSError:
        return
    try:
        if os.fork() == 0:
            tee.keep()
            close_all_but({held_fd, *tee.descriptors()})
            os.write(held_fd, b"1")
            tee.copy_to_the_end()
    finally:
        os._exit(0)


def _enter_copied(tee: Tee, done_fd: int) -> None:
    originals = {fd: lift(os.dup(fd), HIGH_FD) for channel in tee.channels for fd in channel.fds}
    tee.enter()
    os.environ[KEPT_MARK] = f"{os.getpid()}:"
    atexit.register(_leave_copied, os.getpid(), {fd: (_place(fd), original) for fd, original in originals.items()}, done_fd)


def _leave_copied(pid: int, originals: dict[int, tuple[tuple[int, int], int]], done_fd: int) -> None:
    """At exit: back to the original descriptors, once the copier has passed on all; whoever waits for this process then finds its output whole."""
    if os.getpid() != pid:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, replaced or broken by the program: the interpreter tells it in its own way
            stream.flush()
    for fd, (place, original) in originals.items():
        if _place(fd) == place:
            with contextlib.suppress(OSError):  # the program has closed every descriptor that it did not know
                os.dup2(original, fd)
    poller = select.poll()
    poller.register(done_fd, 0)
    poller.poll(LAST_COPY_MS)


def _place(fd: int) -> tuple[int, int]:
    """What `fd` leads to; (0, 0) where the program closed it."""
    try:
        found = os.fstat(fd)
    except OSError:
        return (0, 0)
    return (found.st_dev, found.st_ino)
