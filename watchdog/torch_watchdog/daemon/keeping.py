"""What a daemon does beside its jobs, now and then: says to the others over its store that it is there, to a heartbeat's receiver, too, and removes
what is old.

Owns these tasks. What fails is said once and tried again; nothing here keeps a job waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import TYPE_CHECKING

from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.heartbeat import keep_beating
from torch_watchdog.daemon.ingest import Ingest
from torch_watchdog.errors import StoreError
from torch_watchdog.store.retention import forget_old_files
from torch_watchdog.threads import Threads

if TYPE_CHECKING:
    from torch_watchdog.daemon.alerting import Alerting
    from torch_watchdog.store.fleet import FleetStore

__all__ = ["keeping"]

_BEATS_IN_A_LEASE = 6
_RETENTION_EVERY_S = 3600.0


@contextlib.asynccontextmanager
async def keeping(
    config: DaemonConfig,
    ingest: Ingest,
    alerting: Alerting | None,
    store: FleetStore | None,
    *,
    problem: Callable[[], str | None],
    say: Callable[[str], None],
) -> AsyncIterator[None]:
    """While the body runs. `problem`: what keeps the daemon from its work, if anything."""
    tasks = []
    beats, takeovers, removals = (Threads(use) for use in ("beats", "takeovers", "removals"))  # none of them waits for another
    if store is not None:
        beat_s = config.lease_s / _BEATS_IN_A_LEASE
        works = (lambda: _beat(beats, ingest, store, say), lambda: _adopt(takeovers, alerting, store, say))
        tasks += [asyncio.create_task(_every(beat_s, work, say)) for work in works]
    retention_s = config.retention_s
    if retention_s is not None:
        work = lambda: _forget_old(removals, config, retention_s, ingest, store, say)  # noqa: E731
        tasks.append(asyncio.create_task(_every(_RETENTION_EVERY_S, work, say)))
    if config.heartbeat_url is not None:
        beating = keep_beating(config.heartbeat_url, config.heartbeat_s, problem=problem, say=say)
        tasks.append(asyncio.create_task(beating))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for threads in (beats, takeovers, removals):
            threads.close()


async def _every(seconds: float, work: Callable[[], Awaitable[None]], say: Callable[[str], None]) -> None:
    has_failed = False
    while True:
        try:
            await work()
        except StoreError:
            pass  # the mirror has said it, or will
        except Exception as error:  # noqa: BLE001 - a daemon that stops beating loses all its jobs to others
            if not has_failed:
                say(f"looking after the store failed ({type(error).__name__}: {str(error)[:200]}): it is tried again")
            has_failed = True
        await asyncio.sleep(seconds)


async def _beat(threads: Threads, ingest: Ingest, store: FleetStore, say: Callable[[str], None]) -> None:
    held = tuple(live.job.name for live in ingest.jobs)
    lost = await threads.run(lambda: store.beat(held))
    for name in sorted(lost):
        ingest.give_up(name, "another daemon")
    if lost:
        say(f"{len(lost)} jobs are at another daemon now, which did not hear of this one for too long: {_some(lost)}")


async def _adopt(threads: Threads, alerting: Alerting | None, store: FleetStore, say: Callable[[str], None]) -> None:
    """Beside the beats, because it may take longer than a lease."""
    adopted = await threads.run(lambda: store.adopt(tells=alerting is not None))
    if adopted:
        say(f"took over {len(adopted)} jobs of a daemon that is gone or has ended: {_some(adopted)}")
    if adopted and alerting is not None:
        await alerting.adopted(adopted)


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")


async def _forget_old(
    threads: Threads, config: DaemonConfig, retention_s: float, ingest: Ingest, store: FleetStore | None, say: Callable[[str], None]
) -> None:
    before_s, held = time.time() - retention_s, tuple(live.job.name for live in ingest.jobs if live.job.state != "ended")
    old = set(await threads.run(lambda: forget_old_files(config.runs_dir, before_s, held)))
    if store is not None:
        old |= set(await threads.run(lambda: store.forget_older(before_s, held)))
    if old:
        say(f"removed the records of {len(old)} jobs that are older than {retention_s / 86_400:g} days: {_some(old)}")
