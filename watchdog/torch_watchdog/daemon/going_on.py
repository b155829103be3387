"""The lines that go on from a job's checkpoint, for an alert: from the record that its launch keeps, where this daemon sees it.

Owns no words: they are the launch's own (launch/going_on.py), with the secrets that its record does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch_watchdog.errors import WatchdogError
from torch_watchdog.launch.going_on import to_go_on
from torch_watchdog.store.read import read_job
from torch_watchdog.store.run_directory import RunDirectory
from torch_watchdog_agent.asked import TAKEN

__all__ = ["going_on_lines"]


def going_on_lines(directory: RunDirectory, checkpoint: Mapping[str, Any]) -> Sequence[str]:
    """For whoever stands anywhere; nothing where the record cannot be read. Reads one small file."""
    with suppress(WatchdogError, OSError):
        record, root = read_job(directory.root), directory.root
        quarantine = str(directory.quarantine_file) if directory.quarantine_file.exists() else None
        return to_go_on(checkpoint, record, root, here="", quarantine=quarantine, restores=(root / TAKEN).exists())
    return ()
