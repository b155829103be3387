"""What pages and answers show of a daemon: its jobs as they are now, and what the run directories keep of them.

Owns no state and changes none but by `request_order`. Everything that reads a disk is a coroutine, done in another thread: the loop that it is called
on sends orders to ranks. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog.daemon.counters import Counters
from torch_watchdog.daemon.disk import DiskReader, Listed, PastList
from torch_watchdog.daemon.grants import told_as
from torch_watchdog.daemon.ingest import Ingest
from torch_watchdog.daemon.live_job import LiveJob
from torch_watchdog.errors import StoreError, UnknownJobError
from torch_watchdog.job.events import OrderRequested, Refused
from torch_watchdog.store.past import PastJob, past_job
from torch_watchdog.store.read import read_events, read_newest_blocks
from torch_watchdog_proto.envelopes import JobStatus, OrderAnswer, OrderKind
from torch_watchdog_proto.messages import StepBlock

if TYPE_CHECKING:
    from torch_watchdog.daemon.alerting import Alerting
    from torch_watchdog.daemon.audit import Audit
    from torch_watchdog.store.elsewhere import Elsewhere

__all__ = ["FleetView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """Every method that names a job raises UnknownJobError. `clock` is seconds since the epoch, `ready` what keeps the daemon from its work, if anything."""

    ingest: Ingest
    clock: Callable[[], float]
    counters: Counters
    ready: Callable[[], str | None]
    disk: DiskReader
    past: PastList
    alerting: Alerting | None = None
    audit: Audit | None = None
    elsewhere: Elsewhere | None = None
    store_away_s: Callable[[], float] = float  # how long a shared store has not answered

    def live_jobs(self) -> Sequence[LiveJob]:
        return self.ingest.jobs

    def jobs(self) -> Sequence[JobStatus]:
        """Newest first, with their ranks."""
        return sorted((live.job.status() for live in self.ingest.jobs), key=lambda status: status.started_s, reverse=True)

    def job(self, name: str) -> JobStatus:
        return self.ingest.live(name).job.status()

    def run_dir(self, name: str) -> Path:
        return self.ingest.live(name).run_dir

    def incidents(self, name: str) -> Sequence[Mapping[str, Any]]:
        """As their JSON objects, oldest first."""
        return self.ingest.live(name).job.incidents

    async def past_jobs(self) -> Listed:
        """Jobs that ended before this daemon began, or at another one over the same store."""
        return await self.past.without({job.job.name for job in self.ingest.jobs})

    async def past_job(self, name: str) -> PastJob:
        """One of those. Raises DiskAwayError, as all that reads."""
        return await self.disk.read(lambda: self._past_job(name))

    def _past_job(self, name: str) -> PastJob:
        found, at = past_job(self.ingest.runs_dir, name, now_s=time.time()), None
        if found is None and self.elsewhere is not None:
            with contextlib.suppress(StoreError):
                found, at = self.elsewhere.job(name), self.elsewhere.owner(name)
        if found is None:
            raise UnknownJobError(name, tuple(live.job.name for live in self.ingest.jobs), at=at)
        return found

    async def any_job(self, name: str) -> JobStatus:
        """With its ranks, whether or not it has reported to this daemon; as the next two."""
        return self.job(name) if self.is_live(name) else (await self.past_job(name)).status

    async def any_incidents(self, name: str) -> Sequence[Mapping[str, Any]]:
        return self.incidents(name) if self.is_live(name) else (await self.past_job(name)).incidents

    async def any_run_dir(self, name: str) -> Path:
        """What this daemon keeps of it."""
        return self.run_dir(name) if self.is_live(name) else (await self.past_job(name)).run_dir

    def is_live(self, name: str) -> bool:
        """Whether it has reported to this daemon."""
        return any(live.job.name == name for live in self.ingest.jobs)

    async def events(self, name: str) -> Sequence[Mapping[str, Any]]:
        """The lines of events.jsonl, oldest first."""
        run_dir = await self.any_run_dir(name)
        return await self.disk.read(lambda: read_events(run_dir))

    async def newest_blocks(self, run_dir: Path, rank: int) -> Sequence[StepBlock]:
        """What the newest segments have of a rank: bounded, however long the run."""
        return await self.disk.read(lambda: read_newest_blocks(run_dir, rank))

    async def request_order(self, name: str, kind: OrderKind, *, by: str, reason: str, who: str) -> OrderAnswer:
        """Asks the job for a clean stop or a checkpoint; one that ended before takes none. `who` is proven by a token, `by` is what the caller says."""
        if self.is_live(name):
            wanted = OrderRequested(kind=kind, by=told_as(who, by)[:200], reason=reason[:1000])
            refusal = next((effect for effect in self.ingest.live(name).handle(wanted) if isinstance(effect, Refused)), None)
            answer = OrderAnswer(accepted=refusal is None, text="every rank is told" if refusal is None else refusal.reason)
        else:
            left = (await self.past_job(name)).left
            answer = OrderAnswer(accepted=False, text="it has ended" if left is None or left.has_ended else f"it {left.advice}")
        self.note(kind, name, who=who, says=by, accepted=answer.accepted, reason=reason)
        return answer

    def note(self, what: str, target: str, *, who: str, says: str, accepted: bool, reason: str = "") -> None:
        """Into the audit log, where one is kept."""
        if self.audit is not None:
            self.audit.note(what, target, who=who, says=says, accepted=accepted, reason=reason)
