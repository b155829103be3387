"""Runs that an earlier daemon left running: a daemon that comes after it waits for a word of theirs.

Owns what counts as such a run. Reads a disk: call it in another thread.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch_watchdog.alerts.silent import Awaited
from torch_watchdog.errors import WatchdogError
from torch_watchdog.store.read import read_events, read_job, read_reports
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog.store.segments import segment_files

__all__ = ["has_ended", "runs_left_running"]

_RECENT_S = 3600.0  # a job that was not heard of for so long before is news to nobody
_MAX_JOB_BYTES = 1 << 20  # of a job.json: where another one lies is told by whoever reports


def runs_left_running(runs_dir: Path, *, now_s: float, names: Collection[str] | None = None) -> list[Awaited]:
    """Those that reported within the last hour and said no goodbye; of these names only, where they are given."""
    try:
        known = [entry.name for entry in os.scandir(runs_dir) if names is None or entry.name in names]
    except OSError:
        return []
    recent = (name for name in sorted(known) if now_s - _last_report_s(runs_dir / name) <= _RECENT_S)
    return [run for name in recent if (run := _left_running(runs_dir / name)) is not None]


def _last_report_s(root: Path) -> float:
    try:
        return max((path.stat().st_mtime for path in segment_files(RunDirectory(root).blocks)[-1:]), default=0.0)
    except OSError:
        return 0.0


def has_ended(root: Path) -> bool:
    """Whether any node has said goodbye, or the launch has written down its end: here, or in its own folder where that can be seen from here."""
    events = read_events(root)
    if any(event.get("kind") == "node.left" for event in events) or _job_of(root).get("ended"):
        return True
    session = next((session for _, session, _ in read_reports(root)), None)
    folders = {Path(event["run_dir"]) for event in events if event.get("kind") == "node.joined" and isinstance(event.get("run_dir"), str)}
    return any(job.get("ended") and job.get("session") == session for job in map(_job_of, folders))


def _job_of(root: Path) -> Mapping[str, Any]:
    """Empty where it is a launch's on another machine."""
    try:
        return read_job(root) if RunDirectory(root).job_file.stat().st_size <= _MAX_JOB_BYTES else {}
    except (WatchdogError, OSError, ValueError):
        return {}


def _left_running(root: Path) -> Awaited | None:
    events = read_events(root)
    nodes = {str(event["node"]) for event in events if event.get("kind") == "node.joined" and event.get("node")}
    if not nodes or has_ended(root):
        return None
    attempts = (event.get("attempt") for event in events)
    return Awaited(job=root.name, attempt=max((one for one in attempts if isinstance(one, int)), default=0), nodes=tuple(sorted(nodes)))
