"""Reading what earlier daemons left of open alerts in run directories.

Owns where they lie. What cannot be read is left out: the worst that follows is an alert that is told again, under the same key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_watchdog.alerts.alert import Alert, lineage_of
from torch_watchdog.alerts.open import Open
from torch_watchdog.store.run_directory import RunDirectory

__all__ = ["all_saved_alerts", "has_open_alerts", "left_open", "saved_alerts"]

_MAX_FILE_BYTES = 4 << 20


def saved_alerts(runs_dir: Path, job: str) -> list[Mapping[str, Any]]:
    """What earlier daemons left of this job and of the runs that it is a requeue of. Reads files."""
    base = lineage_of(job, lambda name: (runs_dir / name).is_dir())
    names = {job, base, *(path.name for path in runs_dir.glob(f"{base}.*") if path.is_dir())} if base != job else {job}
    return [entry for name in sorted(names) for entry in _read(RunDirectory(runs_dir / name).alerts_file)]


def all_saved_alerts(runs_dir: Path, *, take: Callable[[str], bool]) -> list[Mapping[str, Any]]:
    """Of every run that has any. `take`: whether a run is this daemon's to tell of; it may bring newer words of it first."""
    with_any = [path for path in sorted(runs_dir.glob("*/alerts.json")) if _read(path)]
    return [entry for path in with_any if take(path.parent.name) for entry in _read(path)]


def left_open(runs_dir: Path, *, now: float) -> list[Alert]:
    """What no daemon tells of any more and no later run has resolved, of every run of the folder."""
    kept = [Open.from_saved(entry, {}) for entry in all_saved_alerts(runs_dir, take=lambda _: True)]
    return [one.alert for one in kept if one is not None and one.still_stands(now)]


def has_open_alerts(content: bytes) -> bool:
    """Of alerts.json, as a store keeps it."""
    return bool(_alerts_in(content))


def _read(path: Path) -> list[Mapping[str, Any]]:
    try:
        return _alerts_in(path.read_bytes() if path.stat().st_size <= _MAX_FILE_BYTES else b"")
    except OSError:
        return []


def _alerts_in(content: bytes) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(content or "null")
    except (ValueError, RecursionError):
        return []
    alerts = found.get("alerts") if isinstance(found, dict) else None
    return [entry for entry in alerts if isinstance(entry, dict)] if isinstance(alerts, list) else []
