"""The ends of rank processes, seen from beside them: neither their parent nor a debugger.

Owns pidfds and a look into /proc. A rank's exit status is there for as long as its parent has not reaped it; where it was too late, the keeper (the
parent that took the rank's place) ends with the same status a moment later.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "ProcessWatch", "is_alive", "parent_of", "state_of"]

_KEEPER_NAME = "torch-watchdog"
_EXIT_CODE_FIELD = 49  # of /proc/PID/stat after the command's name: field 52
_STATE_FIELD, _PARENT_FIELD = 0, 1
_KEEPER_PATIENCE_S = 3.0
_ASKED_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One process has ended. Both None: nobody could see how."""

    pid: int
    exit_code: int | None = None
    signal: int | None = None


class ProcessWatch:
    """Calls `on_end` once for each watched pid, on the loop's thread."""

    def __init__(self, on_end: Callable[[Ended], None]) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._descriptors: dict[int, int] = {}
        self._keepers: dict[int, int] = {}  # rank's pid -> keeper's pid
        self._known: set[int] = set()
        self._ended_badly: set[int] = set()

    def watch(self, pid: int) -> None:
        """From now on; a pid that is watched already, or was, changes nothing."""
        if pid in self._known or pid <= 1:
            return
        self._known.add(pid)
        keeper = parent_of(pid)
        if keeper is not None and _name(keeper) == _KEEPER_NAME:
            self._keepers[pid] = keeper
        if not self._on_exit(pid, lambda: self._rank_ended(pid)):
            self._loop.call_soon(self._on_end, Ended(pid=pid))

    def keeper_of(self, pid: int) -> int | None:
        """The parent that took its place, whether or not it lives."""
        return self._keepers.get(pid)

    def kill(self, pid: int) -> None:
        """Ends a watched process for sure, and no other that has its number by now."""
        descriptor = self._descriptors.get(pid)
        if descriptor is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def has_lost(self, pids: Iterable[int]) -> bool:
        """Whether one of these has ended badly, or is about to: without its keeper, which the kernel ends it with, or on its way out."""
        return any(pid in self._ended_badly or (pid in self._descriptors and self._is_lost(pid)) for pid in pids)

    def _is_lost(self, pid: int) -> bool:
        keeper = self._keepers.get(pid)
        return _is_bad(_wait_status(pid)) or (keeper is not None and (parent_of(pid) != keeper or not is_alive(keeper)))

    async def settle(self, timeout_s: float) -> None:
        """Waits, within the limit, until every watched process has ended."""
        deadline = self._loop.time() + timeout_s
        while self._descriptors and self._loop.time() < deadline:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        for pid in tuple(self._descriptors):
            self._drop(pid)

    def _on_exit(self, pid: int, then: Callable[[], None]) -> bool:
        """False where there is no such process (or no pidfd on this kernel)."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        self._descriptors[pid] = descriptor

        def ended() -> None:
            self._drop(pid)
            then()

        self._loop.add_reader(descriptor, ended)
        return True

    def _rank_ended(self, pid: int) -> None:
        status = _wait_status(pid)
        keeper = self._keepers.get(pid)
        if status is None and keeper is not None and self._on_exit(keeper, lambda: self._tell(pid, _wait_status(keeper))):
            self._loop.call_later(_KEEPER_PATIENCE_S, self._give_up, pid, keeper)
        else:
            self._tell(pid, status)

    def _give_up(self, pid: int, keeper: int) -> None:
        if keeper in self._descriptors:
            self._drop(keeper)
            self._tell(pid, None)

    def _tell(self, pid: int, status: int | None) -> None:
        if _is_bad(status):
            self._ended_badly.add(pid)
        if status is None:
            self._on_end(Ended(pid=pid))
        elif os.WIFSIGNALED(status):
            self._on_end(Ended(pid=pid, signal=os.WTERMSIG(status)))
        else:
            self._on_end(Ended(pid=pid, exit_code=os.WEXITSTATUS(status)))

    def _drop(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)


def is_alive(pid: int) -> bool:
    """Whether the process still runs: a zombie has ended."""
    fields = _stat(pid)
    return fields is not None and fields[_STATE_FIELD] not in ("Z", "X")


def state_of(pid: int) -> str | None:
    """The kernel's letter: R runs, S and D wait, T is stopped, t is stopped by a debugger."""
    fields = _stat(pid)
    return None if fields is None else fields[_STATE_FIELD]


def _wait_status(pid: int) -> int | None:
    """As wait() gives it; None where the process runs, was reaped, or may not be looked at."""
    fields = _stat(pid)
    if fields is None or fields[_STATE_FIELD] not in ("Z", "X") or len(fields) <= _EXIT_CODE_FIELD:
        return None
    return int(fields[_EXIT_CODE_FIELD])


def _is_bad(status: int | None) -> bool:
    """A process that was asked to end may end by that signal."""
    if not status:
        return False
    return not (os.WIFSIGNALED(status) and os.WTERMSIG(status) in _ASKED_TO_END)


def parent_of(pid: int) -> int | None:
    """None where there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[_PARENT_FIELD])


def _stat(pid: int) -> list[str] | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
