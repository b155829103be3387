"""A process of ours in the command's process group that only notices signals: what it got too, everybody got, and the command needs no copy.

Owns that process and the pipe it reports by. `timeout`, `kill %1`, systemd and Slurm signal a whole group, or every process at once; nothing in
a signal's own information tells that from a signal for one process. It must not know what is done about a signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator

__all__ = ["Witness", "open_witness"]

PATIENCE_S = 0.1  # systemd and Slurm send to one process after the other
PARENT_CHECK_S = 1.0


class Witness:
    """The reports, for the wrapper. Where there is no witness (`report_fd` None) nothing is known to have reached everybody."""

    def __init__(self, report_fd: int | None) -> None:
        self.report_fd = report_fd

    def forget(self) -> None:
        """Drops what came for the witness alone: it must not stand for a later signal."""
        while self._next(0.0) is not None:
            pass

    def saw(self, number: int) -> bool:
        """Whether the same signal reached the witness, now or within `PATIENCE_S`."""
        end_s = time.monotonic() + PATIENCE_S
        while (left_s := end_s - time.monotonic()) > 0:
            if (seen := self._next(left_s)) is None or seen == number:
                return seen == number
        return False

    def _next(self, timeout_s: float) -> int | None:
        if self.report_fd is None or not select.select([self.report_fd], [], [], timeout_s)[0]:
            return None
        report = os.read(self.report_fd, 1)
        if not report:
            self.report_fd = None  # somebody killed it
            return None
        return report[0]


@contextlib.contextmanager
def open_witness(watched: frozenset[signal.Signals]) -> Iterator[Witness]:
    """Forks the witness: call while the `watched` signals are blocked and before any thread starts."""
    report_fd, told_fd = os.pipe2(os.O_CLOEXEC)
    wrapper_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        pid = None  # no process left for it: the command may get a signal twice, which is less than not at all
    if pid == 0:
        _watch(watched, told_fd, wrapper_pid)
    os.close(told_fd)
    try:
        yield Witness(None if pid is None else report_fd)
    finally:
        os.close(report_fd)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _watch(watched: frozenset[signal.Signals], told_fd: int, wrapper_pid: int) -> None:
    """The witness's whole life. It holds nothing open that somebody may wait for the end of."""
    try:
        for fd in (0, 1, 2):
            os.dup2(told_fd, fd)
        os.closerange(3, told_fd)
        os.closerange(told_fd + 1, 1024)
        while os.getppid() == wrapper_pid:
            got = signal.sigtimedwait(watched, PARENT_CHECK_S)
            if got is not None:
                os.write(told_fd, bytes([got.si_signo]))
    finally:
        os._exit(0)
