"""The checkpoint that this launch should begin from: whether anybody has asked for it.

A training that begins from nothing, because its script never calls `restore()`, looks like one that resumed. Knows no steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["TAKEN", "AskedResume"]

TAKEN = "resumed"  # in the run directory once somebody has asked: the launch says at its end where nobody did


class AskedResume:
    """`path` is that of --resume, None where there is none; `speaks` in one rank only. A later `attempt` has the run's own checkpoints, too."""

    def __init__(self, path: str | None, run_dir: Path, *, attempt: int, speaks: bool, say: Callable[[str], None]) -> None:
        self._path, self._run_dir, self._attempt, self._say = path, run_dir, attempt, say
        self._is_open = speaks and (path is not None or attempt > 0)

    def holding(self, name: str) -> Path | None:
        """The checkpoint of --resume, where it is of a framework that keeps a file of that name in it."""
        path = None if self._path is None else Path(self._path)
        return path if path is not None and (path / name).is_file() else None

    def taken(self) -> None:
        """The script asks for what there is, or its framework does."""
        self._is_open = False
        with suppress(OSError):
            (self._run_dir / TAKEN).touch()

    def missed(self) -> None:
        """A step is done. Said after the first one, not after days."""
        if not self._is_open:
            return
        self._is_open = False
        newest = self._of_this_run()
        if newest is not None:
            self._say(
                f"attempt {self._attempt} has not begun from {newest}, the newest good checkpoint of this run: no restore() came before the first "
                "step (what a framework resumes by itself is the script's affair)"
            )
        elif self._path is not None:
            self._say(
                f"--resume {self._path} has not been taken: no restore() came before the first step, this training begins from nothing"
            )

    def _of_this_run(self) -> Path | None:
        if self._attempt == 0:
            return None
        from torch_watchdog_agent.checkpoint.manifest import newest_committed

        with suppress(OSError):
            return newest_committed(self._run_dir / "checkpoints")
        return None
