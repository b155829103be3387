"""The shared store as a daemon uses it: records go in, a run that another daemon had is brought here, and who decides for what is agreed by beats.

Owns the order of these. Blocking: called from other threads than the daemon's loop, except `keep`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from torch_watchdog.errors import StoreError
from torch_watchdog.store.database import Database
from torch_watchdog.store.mirror import Mirror
from torch_watchdog.store.owners import LEASE_S, Beat, Owners
from torch_watchdog.store.record import Record
from torch_watchdog.store.transfer import bring_in, bring_out

__all__ = ["FleetStore"]

_MAX_WAITING_BYTES = 64 << 20


class FleetStore:
    """Of one daemon. Raises StoreError where the database cannot be opened."""

    def __init__(self, url: str, runs_dir: Path, *, say: Callable[[str], None], lease_s: float = LEASE_S) -> None:
        self._runs_dir = runs_dir
        self._database = Database.open(url)
        self._adopted = set[str]()  # what this folder has of them is older than the store's
        me = f"{socket.gethostname()}:{runs_dir}"[:200]
        self._owners = Owners(self._database, me, clock=time.monotonic, now=time.time, lease_s=lease_s)
        self.mirror = Mirror(self._database, max_bytes=_MAX_WAITING_BYTES, say=say)

    def keep(self, record: Record, done: Callable[[], None] | None = None) -> None:
        self.mirror.put(record, done)

    def open_run(self, run: str) -> None:
        """This daemon decides for the run, and its folder holds all there is of it. Raises JobElsewhereError, StoreError, OSError."""
        self._owners.claim(run)
        run_dir = self._runs_dir / run
        bring_in(
            self._database, run_dir, has_newest=run not in self._adopted
        )  # first: what this daemon wrote and died before it could bring
        bring_out(self._database, run, run_dir)

    def beat(self, held: Collection[str]) -> Beat:
        """Adopted runs are in this daemon's folder then. Raises StoreError."""
        beat = self._owners.beat(held)
        for run in sorted(beat.adopted):
            self._adopted.add(run)
            bring_out(self._database, run, self._runs_dir / run)
        return beat

    def forget_older(self, before_s: float, held: Collection[str]) -> tuple[str, ...]:
        return self._database.forget_older(before_s, held)

    def close(self, timeout_s: float) -> bool:
        closed = self.mirror.close(timeout_s)
        if closed and not self.mirror.away_s:
            with contextlib.suppress(StoreError):
                self._owners.release()
        self._database.close()
        return closed
