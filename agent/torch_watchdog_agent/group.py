"""Whether a process group still does anything. Standard library only: the keeper asks, in every rank, before torch is imported."""

from __future__ import annotations

import os

__all__ = ["lives"]


def lives(group: int) -> bool:
    """False where only zombies are left of it: nobody reaps orphans in many containers, and a signal finds these for ever. True where it cannot be told."""
    try:
        pids = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - pathlib is not loaded for it
    except OSError:
        return True
    return any(_is_alive_in(pid, group) for pid in pids)


def _is_alive_in(pid: str, group: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, _, its_group = stat.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):
        return False  # gone meanwhile
    return int(its_group) == group and state not in (b"Z", b"X")
