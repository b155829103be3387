"""The checkpoint that this launch was told to resume from: whether anybody has asked for it.

A training that begins from nothing, because its script never calls `restore()`, looks like one that resumed. Knows neither checkpoints nor steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["TAKEN", "AskedResume"]

TAKEN = "resumed"  # in the run directory: the launch says at its end where it is missing


class AskedResume:
    """`path` is that of --resume, None where there is none; `speaks` in one rank only."""

    def __init__(self, path: str | None, run_dir: Path, *, speaks: bool, say: Callable[[str], None]) -> None:
        self._path, self._run_dir, self._say = path, run_dir, say
        self._is_open = speaks and path is not None

    def taken(self) -> None:
        """The script asks for it, or its framework does."""
        self._is_open = False
        with suppress(OSError):
            (self._run_dir / TAKEN).touch()

    def missed(self) -> None:
        """A step is done. Said after the first one, not after days."""
        if self._is_open:
            self._is_open = False
            self._say(
                f"--resume {self._path} has not been taken: no restore() came before the first step, this training begins from nothing"
            )
