"""The daemon's writers of one run directory.

Owns which file gets what, and in which order. Called from the store's one thread only; raises OSError and leaves it to the caller to count. Never
touches what the launcher or the ranks write (job.json, logs, checkpoints), except to copy a contract beside its incident.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog.store.segments import SegmentWriter
from torch_watchdog_proto.codec import stored_report
from torch_watchdog_proto.messages import NodeReport

__all__ = ["JobFiles"]


class JobFiles:
    """One job's files. Nothing is created before there is something to write."""

    def __init__(self, root: Path) -> None:
        self._directory = RunDirectory(root)
        self._segments = SegmentWriter(self._directory.blocks)
        self._events: TextIO | None = None

    def append_report(self, node: str, session: str, report: NodeReport) -> None:
        """Keeps the report as it came; reports that say nothing are kept too, because their numbers must outlive the daemon."""
        self.append_stored(stored_report(node, session, report))

    def append_stored(self, stored: bytes) -> None:
        """The same as a frame that is made already."""
        self._segments.append(stored)

    def append_event(self, event: Mapping[str, Any]) -> None:
        """One line of events.jsonl."""
        if self._events is None:
            self._events = self._open_events()
        self._events.write(json.dumps(event, separators=(", ", ": "), allow_nan=False) + "\n")
        self._events.flush()

    def write_incident(self, incident: Mapping[str, Any], contract_of_rank: int | None) -> None:
        """incident.json as a whole, and a copy of what the rank had learned where it left that."""
        folder = self._directory.incident(str(incident["id"]))
        write_json(folder / "incident.json", incident)
        if contract_of_rank is not None:
            self._copy_contract(folder, contract_of_rank)

    def write_stacks(self, incident_id: str, text: str) -> None:
        """stacks.txt beside the incident: code and paths of the user's, so for this user only."""
        folder = self._directory.incident(incident_id)
        folder.mkdir(parents=True, exist_ok=True)
        with open(os.open(folder / "stacks.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)

    def close(self) -> None:
        self._segments.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _open_events(self) -> TextIO:
        path = self._directory.events_file
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
        if _is_torn(path):
            file.write("\n")  # a daemon died in the middle of a line: ours must not be glued to it
        return file

    def _copy_contract(self, folder: Path, rank: int) -> None:
        source, target = self._directory.contract_file(rank), folder / "contract.json"
        if source.is_file() and not target.exists():
            shutil.copyfile(source, target)


def _is_torn(path: Path) -> bool:
    """Whether the file ends in the middle of a line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() not in (b"", b"\n")
