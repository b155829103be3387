"""Ended jobs that other daemons over the same store have written: to look at from here, too.

Owns copies of the few that were asked for, in a folder beside the runs that nothing else looks into. Reads store and disk: call it in another thread.
Every method raises StoreError.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_watchdog.store.database import Database
from torch_watchdog.store.past import MAX_JOBS, PastJob, past_job, status_of
from torch_watchdog.store.record import REPLACED, Kind
from torch_watchdog.store.transfer import bring_out
from torch_watchdog_proto.envelopes import JobStatus

__all__ = ["Elsewhere"]

_FOLDER = ".elsewhere"
_MAX_KEPT = 20
_LOOK_AGAIN_S = 5.0


class Elsewhere:
    """`me` and `runs_dir` are this daemon's. `check_there` raises StoreError where the store is known not to answer: whoever looks does not wait for it."""

    def __init__(self, database: Database, runs_dir: Path, *, me: str, check_there: Callable[[], None]) -> None:
        self._database, self._copies, self._me, self._check_there = database, runs_dir / _FOLDER, me, check_there
        self._known: dict[str, JobStatus] = {}  # what has ended has ended
        self._not_ended_s: dict[str, float] = {}  # when it was looked at: events of a run of weeks take a while to read
        self._brought: dict[str, int] = {}  # copy -> the newest record in it
        self._lock = threading.Lock()
        shutil.rmtree(self._copies, ignore_errors=True)  # of an earlier daemon

    def jobs(self, but: Collection[str]) -> tuple[list[JobStatus], int]:
        """Without their ranks; and how many older ones are left out."""
        self._check_there()
        runs = self._database.runs()
        names = sorted(runs.keys() - set(but), key=lambda name: runs[name], reverse=True)
        with self._lock:
            for gone in self._known.keys() - runs.keys():
                self._known.pop(gone)
                self._forget(gone)
            found = [status for name in names[:MAX_JOBS] if (status := self._status(name)) is not None]
        return found, max(0, len(names) - MAX_JOBS)

    def job(self, name: str) -> PastJob | None:
        """With its ranks, from a copy that is brought here. None where there is no such job, or one that has not ended."""
        if "/" in name or name.startswith("."):
            return None
        self._check_there()
        with self._lock:
            if self._status(name) is None:
                return None
            self._bring(name)
            return past_job(self._copies, name, now_s=math.inf)

    def owner(self, name: str) -> str | None:
        """The other daemon that decides for it, if one does."""
        self._check_there()
        owner = self._database.owner(name)
        return None if owner == self._me else owner or None

    def _status(self, name: str) -> JobStatus | None:
        if name not in self._known and time.monotonic() - self._not_ended_s.get(name, -math.inf) >= _LOOK_AGAIN_S:
            events = self._objects(name, "event")
            if _all_left(events):
                self._known[name] = status_of(self._copies / name, {}, events, self._objects(name, "incident"))
            else:
                self._not_ended_s[name] = time.monotonic()
        return self._known.get(name)

    def _objects(self, name: str, kind: Kind) -> list[Mapping[str, Any]]:
        try:
            return [json.loads(record.content) for record in self._database.records(name, kind)]
        except (ValueError, zlib.error):
            return []

    def _bring(self, name: str) -> None:
        newest = self._database.newest(name)
        kinds = () if newest != self._brought.get(name) else tuple(REPLACED)
        bring_out(self._database, name, self._copies / name, *kinds)
        self._brought[name] = newest
        for gone in list(self._brought)[:-_MAX_KEPT]:
            self._forget(gone)

    def _forget(self, name: str) -> None:
        if self._brought.pop(name, None) is not None:
            shutil.rmtree(self._copies / name, ignore_errors=True)


def _all_left(events: Sequence[Mapping[str, Any]]) -> bool:
    nodes = {event.get("node") for event in events if event.get("kind") == "node.joined"}
    left = [event for event in events if event.get("kind") == "node.left"]
    return 0 < len(nodes) <= len(left)
