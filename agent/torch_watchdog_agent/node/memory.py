"""How often the kernel has killed a process of this container for want of memory.

Owns the reading of the cgroup's counter (version 2, and version 1 where that is what there is). Where neither can be read nothing is known.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

__all__ = ["OomKills"]

_ROOT = Path("/sys/fs/cgroup")


class OomKills:
    """Counts from when it was made."""

    def __init__(self, *, cgroup_file: Path = Path("/proc/self/cgroup"), root: Path = _ROOT) -> None:
        self._files = _counters(cgroup_file, root)
        self._before = self._count()

    def new(self) -> int:
        """Kills since the last question."""
        before, self._before = self._before, self._count()
        return max(0, self._before - before)

    def _count(self) -> int:
        for file in self._files:
            with suppress(OSError):
                found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
                if found is not None:
                    return int(found[1])
        return 0


def _counters(cgroup_file: Path, root: Path) -> tuple[Path, ...]:
    """In a container its own group is mounted as the root, whatever path the host sees."""
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:
        return ()
    paths = [(controllers, path.lstrip("/")) for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)]
    second = [root / path / "memory.events" for controllers, path in paths if not controllers]
    first = [root / "memory" / path / "memory.oom_control" for controllers, path in paths if "memory" in controllers.split(",")]
    return (*second, *first, root / "memory.events", root / "memory" / "memory.oom_control")
