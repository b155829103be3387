"""Reading run directories for those who only look: threads of its own, and a patience that ends.

Owns the patience. A network disk that hangs keeps these threads and nobody else: orders, hellos and beats are done by others, and a daemon ends without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch_watchdog.errors import DiskAwayError, StoreError
from torch_watchdog.store.past import Known, past_jobs
from torch_watchdog.threads import Threads
from torch_watchdog_proto.envelopes import JobStatus

if TYPE_CHECKING:
    from torch_watchdog.store.elsewhere import Elsewhere

__all__ = ["DiskReader", "Listed", "PastList"]

_T = TypeVar("_T")
_MAX_THREADS, _MAX_WAITING = 4, 64
_PATIENCE_S, _PATIENCE_WITH_A_LIST_S = 20.0, 3.0


class DiskReader:
    """`folder` is named where it does not answer."""

    def __init__(self, folder: Path, *, patience_s: float = _PATIENCE_S) -> None:
        self._folder, self._patience_s = folder, patience_s
        self._threads = Threads("disk", _MAX_THREADS)

    async def read(self, work: Callable[[], _T]) -> _T:
        """What `work` returns, or raises. Raises DiskAwayError where that takes longer than the patience lasts."""
        if self._threads.num_waiting >= _MAX_WAITING:
            raise DiskAwayError(self._folder, 0.0)
        try:
            async with asyncio.timeout(self._patience_s):
                return await self._threads.run(work)
        except TimeoutError as error:
            raise DiskAwayError(self._folder, self._patience_s) from error

    def close(self) -> None:
        """Waits for nothing."""
        self._threads.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Newest first, without their ranks; how many older ones are left out; and whether this is an earlier list, because the disk does not answer now."""

    jobs: tuple[JobStatus, ...] = ()
    older: int = 0
    is_earlier: bool = False


class PastList:
    """The ended jobs of a folder, read again where their files have changed, and those of other daemons. One reading at a time, however many ask."""

    def __init__(
        self, runs_dir: Path, disk: DiskReader, elsewhere: Elsewhere | None = None, *, patience_s: float = _PATIENCE_WITH_A_LIST_S
    ) -> None:
        self._runs_dir, self._disk, self._elsewhere, self._patience_s = runs_dir, disk, elsewhere, patience_s
        self._known: Known = {}
        self._newest = Listed()
        self._reading: asyncio.Task[Listed | None] | None = None

    async def without(self, live: Collection[str]) -> Listed:
        """All but those."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(frozenset(live)))
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                found = await asyncio.shield(self._reading)
        self._newest = found or self._newest
        jobs = tuple(job for job in self._newest.jobs if job.job not in live)
        return Listed(jobs=jobs, older=self._newest.older, is_earlier=found is None)

    async def _read(self, live: Collection[str]) -> Listed | None:
        """None where the disk does not answer."""
        try:
            return await self._disk.read(lambda: self._found(live))
        except DiskAwayError:
            return None

    def _found(self, live: Collection[str]) -> Listed:
        jobs, older = past_jobs(self._runs_dir, but=live, now_s=time.time(), known=self._known)
        if self._elsewhere is not None:
            with contextlib.suppress(StoreError):  # what is here is shown all the same
                more, more_older = self._elsewhere.jobs({*live, *(job.job for job in jobs)})
                jobs, older = sorted((*jobs, *more), key=lambda job: job.started_s, reverse=True), older + more_older
        return Listed(jobs=tuple(jobs), older=older)
