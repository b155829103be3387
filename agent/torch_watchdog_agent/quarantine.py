"""Samples that are left out, so that the same sample never stops a job twice. One JSON object a line; ranks append, everybody reads.

Owns the file's form. A quarantined index is replaced by another of the same batch: shapes, and so the collectives, stay what they were. Knows no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_watchdog_proto.messages import Violation

__all__ = ["FILE_NAME", "Quarantine", "dataset_name"]

FILE_NAME = "quarantine.jsonl"
MAX_FILE_BYTES = 64 << 20


def dataset_name(dataset: Any) -> str:
    """What tells one data set of a job from another: its class and length (an index of the training set means nothing in the evaluation set)."""
    try:
        length: object = len(dataset)
    except (TypeError, NotImplementedError):
        length = "?"
    return f"{type(dataset).__qualname__}[{length}]"


class Quarantine:
    """The quarantined samples of a run. `file` begins with those that the launch was given; the ranks append to it. `say`: hears once of
    those that are left out from a later pass on; of the others the launch has told.
    """

    def __init__(self, file: Path, *, say: Callable[[str], None] | None = None) -> None:
        self._file, self._say = file, say
        self._at_first: int | None = None  # how many there were at the begin of the first pass
        self._before: dict[str, dict[str, Any]] = {}  # of the checkpoint that was resumed from, each by its own line
        self._seen: dict[str, frozenset[int]] = {}

    @property
    def holds_any(self) -> bool:
        return bool(self._seen)

    def take_over(self, path: Path) -> int:
        """Those of the checkpoint that is resumed from are left out, too; returns how many of them the run did not know."""
        self._before = {json.dumps(entry): entry for entry in _entries(path)}
        return len(self._before.keys() - {json.dumps(entry) for entry in _entries(self._file)})

    def lines(self) -> tuple[str, ...]:
        """All that this run leaves out, as a file would hold it, for a checkpoint."""
        return tuple({**self._before, **{json.dumps(entry): entry for entry in _entries(self._file)}})

    def reload(self) -> None:
        """Reads the file again: at the begin of each pass over the data, because the other ranks may have added to them."""
        found: dict[str, set[int]] = {}
        for entry in (*self._before.values(), *_entries(self._file)):
            found.setdefault(entry["dataset"], set()).add(entry["dataset_index"])
        self._seen = {name: frozenset(indices) for name, indices in found.items()}
        self._tell(sum(map(len, found.values())))

    def _tell(self, count: int) -> None:
        if self._at_first is None:
            self._at_first = count
        elif self._say is not None and count > self._at_first:
            self._say(f"samples left out from here on: {count} ({self._file}); another of the same batch stands in for each")
            self._say = None

    def add(self, violation: Violation, *, dataset: str, rank: int, step: int) -> bool:
        """Appends the sample of a violation; False where it is not known which sample it was. Raises OSError."""
        sample = violation.batch.sample
        if sample is None or sample.dataset_index is None:
            return False
        entry = {
            "dataset": dataset, "dataset_index": sample.dataset_index, "rank": rank, "step": step, "key": violation.batch.key,
            "reason": violation.summary, "bundle": violation.bundle or None, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip
        self._file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(entry).encode() + b"\n")  # one write: ranks append to one file
        finally:
            os.close(descriptor)
        return True

    def replaced(self, dataset: str, indices: Sequence[Any]) -> Sequence[Any]:
        """The indices of a batch, each quarantined one replaced by a neighbour; as they are where that is impossible."""
        out = self._seen.get(dataset)
        if not out or not any(index in out for index in indices):
            return indices
        fine = [index for index in indices if index not in out]
        return [index if index not in out else fine[position % len(fine)] for position, index in enumerate(indices)] if fine else indices


def _entries(path: Path) -> list[dict[str, Any]]:
    """The sound lines of a file; a torn or foreign one is passed over."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return []
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("dataset"), str) and type(entry.get("dataset_index")) is int:
            found.append(entry)
    return found
