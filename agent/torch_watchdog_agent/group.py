"""A process group: whether it still does anything, and its end. Standard library only: the keeper asks, in every rank, before torch is imported."""

from __future__ import annotations

import os
import signal

__all__ = ["kill", "lives"]

_TRACKER = b"multiprocessing.resource_tracker"  # in its command
_ROUNDS = 3  # of a group that forks meanwhile


def lives(group: int) -> bool:
    """False where only zombies are left of it: nobody reaps orphans in many containers, and a signal finds these for ever. True where it cannot be told."""
    try:
        return any(_is_alive_in(pid, group) for pid in _pids())
    except OSError:
        return True


def kill(group: int) -> None:
    """Ends all of it but Python's trackers of semaphores and shared memory, which remove what those that were killed have left, and then end by themselves."""
    try:
        for _ in range(_ROUNDS):
            members = [pid for pid in _pids() if _is_alive_in(pid, group) and not _is_tracker(pid)]
            for pid in members:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            if not members:
                return
    except OSError:
        os.killpg(group, signal.SIGKILL)  # no /proc


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - pathlib is not loaded for it


def _is_alive_in(pid: str, group: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, _, its_group = stat.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):
        return False  # gone meanwhile
    return int(its_group) == group and state not in (b"Z", b"X")


def _is_tracker(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return _TRACKER in command.read()
    except OSError:
        return False
