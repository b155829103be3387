"""The shared store as a daemon uses it: records go in, a run that another daemon had is brought here, and who decides for what is agreed by beats.

Owns the order of these. Blocking: called from other threads than the daemon's loop, except `keep`.
"""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch_watchdog.errors import StoreError
from torch_watchdog.store.alerts import has_open_alerts
from torch_watchdog.store.database import Database
from torch_watchdog.store.elsewhere import Elsewhere
from torch_watchdog.store.mirror import Mirror
from torch_watchdog.store.owners import LEASE_S, Owners
from torch_watchdog.store.record import Record
from torch_watchdog.store.transfer import bring_in, bring_out

__all__ = ["FleetStore"]

_MAX_WAITING_BYTES = 64 << 20


class FleetStore:
    """Of one daemon. Raises StoreError where the database cannot be opened."""

    def __init__(self, url: str, runs_dir: Path, *, say: Callable[[str], None], lease_s: float = LEASE_S) -> None:
        self._runs_dir, self._say = runs_dir, say
        self._not_taken: set[str] = set()  # tried in vain, and said so
        self._database = Database.open(url)
        self._orphans: Mapping[str, str] = {}
        self._released: frozenset[str] = frozenset()
        self._nothing_open: frozenset[str] = frozenset()  # of those that are nobody's
        self._taking: dict[str, str] = {}  # run -> whose it was, where the answer to its adoption was lost: no beat tells of it any more
        me = f"{socket.gethostname()}:{runs_dir}"[:200]
        self._owners = Owners(self._database, me, clock=time.monotonic, now=time.time, lease_s=lease_s)
        self.mirror = Mirror(self._database, max_bytes=_MAX_WAITING_BYTES, say=say)
        self.elsewhere = Elsewhere(self._database, runs_dir, me=me, check_there=self.mirror.check_there)

    def keep(self, record: Record, done: Callable[[], None] | None = None) -> None:
        self.mirror.put(record, done)

    def open_run(self, run: str) -> None:
        """This daemon decides for the run, and its folder holds all there is of it. Raises JobElsewhereError, StoreError, OSError.

        At once where the store is known not to answer: a caller waits for this, and others wait for the caller.
        """
        self.mirror.check_there()
        was_ours = self._owners.claim(run)
        run_dir = self._runs_dir / run
        bring_in(self._database, run_dir, has_newest=was_ours)  # first: what this daemon wrote and died before it could bring
        bring_out(self._database, run, run_dir)

    def beat(self, held: Collection[str]) -> frozenset[str]:
        """Says that this daemon is there; which of its runs others have taken. Raises StoreError."""
        beat = self._owners.beat(held)
        self._orphans, self._released = beat.orphans, beat.released
        return beat.lost

    def adopt(self, *, tells: bool) -> frozenset[str]:
        """Takes the runs of daemons that the last beat found gone, and where this one `tells` of alerts, those that an ended one left with an open alert.

        Their files are in this daemon's folder then. Takes its time. Never raises: of what was taken before something failed, somebody must be told.
        """
        adopted = set[str]()
        orphans = self._up_for_adoption(tells)
        for run in sorted(orphans, key=lambda run: (run in self._not_taken, run)):  # what failed before comes last: it keeps back no other
            try:
                bring_out(self._database, run, self._runs_dir / run)  # first: who has a run has its newest words
                again = run in self._taking
                self._taking[run] = orphans[run]
                if self._owners.adopt(run, orphans[run], again=again):
                    adopted.add(run)
                self._taking.pop(run)
            except Exception as error:  # noqa: BLE001 - a folder that cannot be written, a record that nobody can read
                self._cannot_take(run, error)
                if isinstance(error, StoreError) and not error.is_refusal:
                    break  # it is away: the others would each wait for it
            else:
                self._not_taken.discard(run)
        return frozenset(adopted)

    def _cannot_take(self, run: str, error: Exception) -> None:
        if run not in self._not_taken:
            self._say(f"job {run} cannot be taken over ({type(error).__name__}: {str(error)[:200]}): it is tried again")
        self._not_taken.add(run)

    def _up_for_adoption(self, tells: bool) -> Mapping[str, str]:
        left_open = frozenset[str]()
        if tells:
            with contextlib.suppress(StoreError):  # the mirror has said it, or will
                left_open = self._left_open()
        return {**self._taking, **self._orphans, **dict.fromkeys(left_open, "")}

    def _left_open(self) -> frozenset[str]:
        """Nobody writes of a run that is nobody's: each is looked at once. What is not open waits for the next word of its nodes."""
        new = self._released - self._nothing_open
        left_open = frozenset(run for run in new if any(map(_has_open, self._database.records(run, "alerts"))))
        self._nothing_open = (self._nothing_open & self._released) | (new - left_open)
        return left_open

    def forget_older(self, before_s: float, held: Collection[str]) -> tuple[str, ...]:
        return self._database.forget_older(before_s, held)

    def close(self, timeout_s: float) -> bool:
        closed = self.mirror.close(timeout_s)
        if closed and not self.mirror.away_s:
            with contextlib.suppress(StoreError):
                self._owners.release()
        self._database.close()
        return closed


def _has_open(record: Record) -> bool:
    try:
        return has_open_alerts(record.content)
    except zlib.error:
        return False  # as all that cannot be read of alerts: it is left out, and keeps back no other run
