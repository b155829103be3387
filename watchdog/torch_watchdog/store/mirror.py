"""The thread that brings records to the shared store: a database that is slow or away delays acks, never an order to a rank.

Owns a queue, and the patience: what the database does not take now is tried again until it does. Whoever feeds it asks `is_full` first, and lets its
callers wait; what is in the queue is also in the run directory already.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from torch_watchdog.errors import StoreError
from torch_watchdog.store.database import Database
from torch_watchdog.store.record import REPLACED, Record

__all__ = ["Mirror"]

Done: TypeAlias = Callable[[], None]
_Item: TypeAlias = tuple[Record, Done | None]
_BATCH = 200
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0


class Mirror:
    """Writes in the order in which they were given, incidents and alerts before reports and events.

    `say` gets one line when the store goes away, and one when it is back.
    """

    def __init__(self, database: Database, *, max_bytes: int, say: Callable[[str], None]) -> None:
        self._database, self._max_bytes, self._say = database, max_bytes, say
        self._first: deque[_Item] = deque()  # incidents and alerts: few, and what another daemon must know before anything else
        self._waiting: deque[_Item] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._away_since: float | None = None
        self._away_why: StoreError | None = None
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="torch-watchdog-mirror", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._max_bytes

    @property
    def away_s(self) -> float:
        """For how long the database has not answered; 0 where it does."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def check_there(self) -> None:
        """Raises StoreError where the last write has failed."""
        if self._away_since is not None and self._away_why is not None:
            raise StoreError(self._away_why.store, self._away_why.reason, f"It has been away for {self.away_s:.0f} s")

    def put(self, record: Record, done: Done | None = None) -> None:
        """`done` is called from the thread once the record is in the database."""
        with self._changed:
            if self._bytes >= 2 * self._max_bytes:  # nobody waited when it was full
                self.num_dropped += 1
                return
            (self._first if record.kind in REPLACED else self._waiting).append((record, done))
            self._bytes += len(record.body)
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Lets what waits be written, for at most so long. False where something is left: it is in the run directories."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while batch := self._next_batch():
            try:
                self._write([record for record, _ in batch])
            except StoreError as error:
                self._is_away(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, timeout=wait_s)
                    if self._closing and wait_s >= _LONGEST_WAIT_S:
                        return
                wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)
                continue
            self._is_back()
            wait_s = _FIRST_WAIT_S
            self._take_off(batch)
            _call(done for _, done in batch)

    def _write(self, records: Sequence[Record]) -> None:
        """Raises StoreError where it must be tried again. One that the database will never take must not keep back the others."""
        try:
            self._database.write(records)
        except StoreError as error:
            if not error.is_refusal:
                raise
            if len(records) == 1:
                self.num_dropped += 1
                return
            for record in records:
                self._write([record])

    def _next_batch(self) -> list[_Item]:
        """Waits for one; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._first or self._waiting or self._closing)
            return list(itertools.islice(self._first or self._waiting, _BATCH))

    def _take_off(self, batch: Sequence[_Item]) -> None:
        with self._changed:
            for item in batch:
                (self._first if item[0].kind in REPLACED else self._waiting).popleft()
                self._bytes -= len(item[0].body)

    def _is_away(self, error: StoreError) -> None:
        if self._away_since is None:
            self._away_why, self._away_since = error, time.monotonic()
            self._say(f"{error}: reports wait for it, here and on the nodes; jobs are judged and stopped as before")

    def _is_back(self) -> None:
        if self._away_since is not None:
            away_s, self._away_since = self.away_s, None
            self._say(
                f"the store is back after {away_s:.0f} s: nothing was lost"
                if not self.num_dropped
                else f"the store is back: {self.num_dropped} lost"
            )


def _call(dones: Iterable[Done | None]) -> None:
    for done in dones:
        if done is not None:
            done()
