"""The names of a run directory, and the writers that leave no file half written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch_watchdog.errors import RunDirectoryError

__all__ = ["FileVersion", "RunDirectory", "file_version", "make_folder", "reserve", "write_json", "write_last"]

FileVersion: TypeAlias = tuple[int, int, int]  # another one wherever the file was written to, or replaced


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where each thing of one job lies. Nothing is created by looking."""

    root: Path

    @property
    def job_file(self) -> Path:
        """Written by the launcher: command, versions, world, start, end, exit reason."""
        return self.root / "job.json"

    @property
    def reserved_file(self) -> Path:
        """Room for the end in job.json, so that a disk that is full by then can still take it; gone once that is written."""
        return self.root / ".job.json.reserved"

    @property
    def blocks(self) -> Path:
        return self.root / "blocks"

    @property
    def events_file(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def alerts_file(self) -> Path:
        """Alerts of this job that are open, and who was told what of them."""
        return self.root / "alerts.json"

    @property
    def incidents(self) -> Path:
        return self.root / "incidents"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def quarantine_file(self) -> Path:
        """Samples that are left out: those of earlier runs that the launch was given, then what the ranks add."""
        return self.root / "quarantine.jsonl"

    def incident(self, incident_id: str) -> Path:
        """Folder of one incident."""
        return self.incidents / incident_id

    def contract_file(self, rank: int) -> Path:
        """What the rank has learned, written by the rank."""
        return self.root / "contract" / f"rank-{rank}.json"


def make_folder(path: Path) -> None:
    """For run directories, where there is none. Raises RunDirectoryError where it cannot be, or cannot be written to."""
    advice = "Pass --dir DIR with a folder that can be written to"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise RunDirectoryError(path, "is no folder", advice) from error
    except OSError as error:
        raise RunDirectoryError(path, f"cannot be made ({error.strerror})", advice) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise RunDirectoryError(path, "cannot be written to", advice)


def file_version(path: Path) -> FileVersion | None:
    """None where it cannot be seen."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = 0o666) -> None:
    """Replaces `path` at once: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def reserve(path: Path, size: int) -> None:
    """Takes that much of the disk, where it is there to be had."""
    with suppress(OSError), path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def write_last(path: Path, value: Mapping[str, Any], *, reserved: Path) -> None:
    """As `write_json`; on a full disk in the place of what was reserved, or, where a file is never written in place, with the room that it gives back."""
    try:
        write_json(path, value)
    except OSError:
        if not reserved.is_file():
            raise
        try:
            with reserved.open("r+", encoding="utf-8") as file:
                json.dump(value, file, indent=1, allow_nan=False)
                file.write("\n")
                file.truncate()
                os.fsync(file.fileno())
            reserved.replace(path)
        except OSError:
            reserved.unlink()
            write_json(path, value)
    finally:
        reserved.unlink(missing_ok=True)
