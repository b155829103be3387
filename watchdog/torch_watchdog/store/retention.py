"""Removing what a daemon wrote of runs that are old: never checkpoints, logs, or what the launcher and the ranks wrote.

Owns what in a run directory is the daemon's. Whether a run is old is seen by its files: what was written last.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from torch_watchdog.store.run_directory import RunDirectory

__all__ = ["forget_old_files"]


def forget_old_files(runs_dir: Path, before_s: float, held: Collection[str]) -> tuple[str, ...]:
    """Of every run that no daemon has written to since then, except those that are held. Returns their names. Raises OSError."""
    old = tuple(path for path in sorted(runs_dir.glob("*")) if path.name not in held and is_old(path, before_s))
    for path in old:
        forget_files(path)
    return tuple(path.name for path in old)


def forget_files(run_dir: Path) -> None:
    """Removes what the daemon wrote of a run, and the folder where nothing else is in it."""
    directory = RunDirectory(run_dir)
    for folder in (directory.blocks, directory.incidents):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (directory.events_file, directory.alerts_file):
        file.unlink(missing_ok=True)
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        run_dir.rmdir()


def is_old(run_dir: Path, before_s: float) -> bool:
    """Whether the daemon has written nothing of the run since then. False for a folder that is no run of a daemon's."""
    directory = RunDirectory(run_dir)
    written = [path for path in (directory.events_file, directory.alerts_file, *directory.blocks.glob("*.seg")) if path.is_file()]
    return bool(written) and all(path.stat().st_mtime < before_s for path in written)
