"""Which daemon decides for which run, where several share a store.

Owns the claims. A daemon counts its beat up in the database; one whose beat has not moved for `LEASE_S`, as another sees it by its own clock, is gone,
and its runs may be taken. So clocks of two machines are never compared. Silence counts only while this daemon itself reaches the database: what all
have missed is nobody's death. Knows nothing of jobs but their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import cast

import sqlalchemy as sa

from torch_watchdog.errors import JobElsewhereError
from torch_watchdog.store.database import DAEMONS, RUNS, Database, upsert

__all__ = ["LEASE_S", "Beat", "Owners"]

LEASE_S = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What one beat found: runs of ours that others have taken; runs of daemons that are gone, with those daemons' names; and runs that nobody has
    decided for since a lease ago.
    """

    lost: frozenset[str] = frozenset()
    orphans: Mapping[str, str] = field(default_factory=dict)
    released: frozenset[str] = frozenset()


class Owners:
    """`me` is this daemon's name: the same after a restart, so that it finds its own runs at once. `clock` only goes forward."""

    def __init__(
        self, database: Database, me: str, *, clock: Callable[[], float], now: Callable[[], float], lease_s: float = LEASE_S
    ) -> None:
        self._database, self._me, self._clock, self._now, self._lease_s = database, me, clock, now, lease_s
        self._seen: dict[str, tuple[int, float]] = {}  # daemon -> its beat, and when it last moved
        self._released: dict[str, float] = {}  # run -> since when it is nobody's
        self._claiming: dict[str, bool] = {}  # run -> whether it was ours, as long as no claim of it is known to be in the database
        self._number = 0
        self._beaten_s = clock()

    def beat(self, held: Collection[str]) -> Beat:
        """Says that this daemon is there; `held` are the runs that it decides for. Raises StoreError."""
        if self._clock() - self._beaten_s > self._lease_s / 2:
            self._seen.clear()  # the database was away, or we were: the others get a whole lease to be heard in
            self._released.clear()
        with self._database.transaction() as connection:
            self._number = max(self._number, connection.scalar(sa.select(DAEMONS.c.beat).where(DAEMONS.c.name == self._me)) or 0) + 1
            connection.execute(upsert(connection, DAEMONS, {"name": self._me, "beat": self._number}, ("beat",)))
            beats = {row.name: row.beat for row in connection.execute(sa.select(DAEMONS))}
            owners = {row.name: row.owner for row in connection.execute(sa.select(RUNS.c.name, RUNS.c.owner))}
            for name in sorted(held):
                if owners.get(name) == self._me:
                    connection.execute(RUNS.update().where(RUNS.c.name == name).values(seen_s=self._now()))
            gone = self._gone(beats, set(owners.values()))
        self._beaten_s = self._clock()
        orphans = {name: owner for name, owner in owners.items() if owner in gone}
        lost = frozenset(name for name in held if owners.get(name) != self._me)
        return Beat(lost=lost, orphans=orphans, released=self._released_for_long({name for name, owner in owners.items() if not owner}))

    def adopt(self, run: str, owner: str, *, again: bool = False) -> bool:
        """Takes a run of a daemon that is gone, or nobody's; False where another one was faster.

        Raises StoreError: where the connection broke between the commit and its answer, the run is ours all the same, and `again` finds that out.
        """
        with self._database.transaction() as connection:
            return self._take(connection, run, owner) or (again and self._owner(connection, run) == self._me)

    def claim(self, run: str) -> bool:
        """This daemon decides for the run from now on. True where it did before, or nobody. Raises JobElsewhereError while another one does, StoreError."""
        with self._database.transaction() as connection:
            was_ours = self._claiming.setdefault(run, self._owner(connection, run) in (None, self._me))
            connection.execute(upsert(connection, RUNS, {"name": run, "owner": self._me, "seen_s": self._now()}, ()))
            self._take(connection, run, "")  # one that was only imported
            owner = self._owner(connection, run)
        self._claiming.pop(run, None)
        if owner != self._me:
            raise JobElsewhereError(run, str(owner))
        return was_ours

    def release(self) -> None:
        """This daemon ends: who is asked next for a run of it need not wait. Raises StoreError."""
        with self._database.transaction() as connection:
            connection.execute(RUNS.update().where(RUNS.c.owner == self._me).values(owner=""))

    def _owner(self, connection: sa.Connection, run: str) -> str | None:
        return cast("str | None", connection.scalar(sa.select(RUNS.c.owner).where(RUNS.c.name == run)))

    def _take(self, connection: sa.Connection, run: str, owner: str) -> bool:
        taken = connection.execute(RUNS.update().where(RUNS.c.name == run, RUNS.c.owner == owner).values(owner=self._me))
        return taken.rowcount == 1

    def _gone(self, beats: dict[str, int], owners: set[str]) -> set[str]:
        now = self._clock()
        for name in owners - {self._me}:
            beat = beats.get(name, 0)
            if self._seen.get(name, (-1, 0.0))[0] != beat:
                self._seen[name] = (beat, now)
        return {name for name in owners - {self._me, ""} if now - self._seen[name][1] >= self._lease_s}

    def _released_for_long(self, nobodys: set[str]) -> frozenset[str]:
        """A daemon that is only started anew finds its own runs again within a lease."""
        now = self._clock()
        self._released = {name: self._released.get(name, now) for name in nobodys}
        return frozenset(name for name, since in self._released.items() if now - since >= self._lease_s)
