"""Readers of a run directory: no daemon needed, a torn tail is no error.

Owns how files become messages again. Never writes. What cannot be read as a whole (a torn frame, a line cut short, an incident that is being
replaced) is left out: the rest of the run is worth more than the error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torch_watchdog.errors import RunDirectoryError
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog.store.segments import read_frames, segment_files
from torch_watchdog.store.shapes import CONTRACT, JOB, NEWEST_JOB_VERSION, incident_schema, object_of
from torch_watchdog_proto.codec import MalformedMessageError, read_stored_report
from torch_watchdog_proto.messages import NodeReport, StepBlock

__all__ = [
    "epoch_s",
    "holds_steps",
    "read_blocks",
    "read_contract",
    "read_events",
    "read_incidents",
    "read_job",
    "read_newest_blocks",
    "read_reports",
    "step_range",
]

_MAX_TEXT_BYTES = 256 << 20


def read_blocks(run_dir: Path, rank: int | None = None, first_step: int | None = None, last_step: int | None = None) -> Iterator[StepBlock]:
    """The blocks that hold any step of the range (inclusive), in the order in which they came. Nothing where there are none."""
    for _, _, report in read_reports(run_dir):
        yield from holds_steps(report.blocks, rank, first_step, last_step)


def read_newest_blocks(run_dir: Path, rank: int | None, max_segments: int = 2) -> tuple[StepBlock, ...]:
    """Of a rank, or of all, from the newest segments only: for a page, which must not read a run of weeks."""
    reports = (report for path in segment_files(RunDirectory(run_dir).blocks)[-max_segments:] for _, _, report in _reports_of(path))
    return tuple(block for report in reports for block in holds_steps(report.blocks, rank))


def read_reports(run_dir: Path) -> Iterator[tuple[str, str, NodeReport]]:
    """Every report that was kept, as (node, session, report)."""
    for path in segment_files(RunDirectory(run_dir).blocks):
        yield from _reports_of(path)


def _reports_of(path: Path) -> Iterator[tuple[str, str, NodeReport]]:
    for frame in read_frames(path):
        try:
            yield read_stored_report(frame.payload)
        except MalformedMessageError:
            continue  # of a newer version: its neighbours may still be read


def holds_steps(
    blocks: Iterable[StepBlock], rank: int | None = None, first_step: int | None = None, last_step: int | None = None
) -> Iterator[StepBlock]:
    """Those of the rank that hold any step of the range (inclusive); None asks for all."""
    for block in blocks:
        first, last = step_range(block)
        too_early = first_step is not None and last < first_step
        too_late = last_step is not None and first > last_step
        if (rank is None or block.rank == rank) and not too_early and not too_late:
            yield block


def step_range(block: StepBlock) -> tuple[int, int]:
    """First and last step that the block says anything about; (0, -1) where it is empty."""
    steps = block.step + block.micro_of_step
    return (min(steps), max(steps)) if steps else (0, -1)


def read_events(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """The lines of events.jsonl, oldest first; a line cut short is left out."""
    found = (object_of(line, {}) for line in _text(RunDirectory(run_dir).events_file).splitlines())
    return tuple(event for event in found if event is not None)


def read_incidents(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """The incidents as their JSON objects, by number."""
    folders = (path for path in RunDirectory(run_dir).incidents.glob("*") if path.name.isascii() and path.name.isdigit())
    found = (object_of(_text(folder / "incident.json"), incident_schema()) for folder in sorted(folders, key=lambda path: int(path.name)))
    return tuple(incident for incident in found if incident is not None)


def read_job(run_dir: Path) -> Mapping[str, Any]:
    """job.json. Raises RunDirectoryError where there is none, it is not what a launch writes, or a newer version wrote it."""
    path = RunDirectory(run_dir).job_file
    if not path.is_file():
        raise RunDirectoryError(path, "there is no such file, so this is no run directory", "Pass the --dir that the launch was given")
    job = object_of(_text(path), JOB)
    if job is None:
        raise RunDirectoryError(path, "this is not the JSON object that a launch writes", "The rest of the run directory may still be read")
    version = job.get("schema_version") or NEWEST_JOB_VERSION
    if version > NEWEST_JOB_VERSION:
        raise RunDirectoryError(path, f"a newer torch-watchdog wrote this (version {version} of its form)", "Read it with that version")
    return job


def read_contract(path: Path) -> Mapping[str, Any]:
    """What a rank learned. Raises RunDirectoryError, OSError where it is not there."""
    found = object_of(path.read_text(encoding="utf-8", errors="replace"), CONTRACT)
    if found is None:
        raise RunDirectoryError(path, "this is not the JSON object that a rank writes", "Look at the file, or at another --rank")
    return found


def epoch_s(text: object) -> float:
    """Of a time as these files have it; 0 where it is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def _text(path: Path) -> str:
    """Of a plain file that is not too large; nothing of anything else. Opening a pipe that nobody writes to would never return."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            known = os.fstat(descriptor)
            return file.read() if stat.S_ISREG(known.st_mode) and known.st_size <= _MAX_TEXT_BYTES else ""
    except OSError:
        return ""
