"""Who was started by whom, from what every kernel's /proc has: its lists of children are a thing of some."""

from __future__ import annotations

from pathlib import Path

__all__ = ["children", "tree"]


def children(pid: int) -> list[int]:
    return [child for child, parent in _parents().items() if parent == pid]


def tree(pid: int) -> list[int]:
    """The process and everything below it, in whatever session."""
    parents, found = _parents(), [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found


def _parents() -> dict[int, int]:
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue
    return parents
