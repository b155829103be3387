"""What a daemon does beside its jobs, now and then: says to the others over its store that it is there, to a heartbeat's receiver, too, and removes
what is old.

Owns these tasks. What fails is said once and tried again; nothing here keeps a job waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.heartbeat import keep_beating
from torch_watchdog.daemon.ingest import Ingest
from torch_watchdog.errors import StoreError
from torch_watchdog.store.retention import forget_old_files

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
    if store is not None:
        tasks.append(asyncio.create_task(_every(config.lease_s / _BEATS_IN_A_LEASE, lambda: _beat(ingest, alerting, store, say))))
    retention_s = config.retention_s
    if retention_s is not None:
        tasks.append(asyncio.create_task(_every(_RETENTION_EVERY_S, lambda: _forget_old(config, retention_s, ingest, store, say))))
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


async def _every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        with contextlib.suppress(StoreError, OSError):  # the mirror has said it, or will
            await work()
        await asyncio.sleep(seconds)


async def _beat(ingest: Ingest, alerting: Alerting | None, store: FleetStore, say: Callable[[str], None]) -> None:
    beat = await asyncio.to_thread(store.beat, tuple(live.job.name for live in ingest.jobs))
    for name in sorted(beat.lost):
        ingest.give_up(name, "another daemon")
    if beat.lost:
        say(
            f"{len(beat.lost)} jobs are at another daemon now, which did not hear of this one for too long: {', '.join(sorted(beat.lost)[:5])}"
        )
    if beat.adopted:
        say(f"took over {len(beat.adopted)} jobs of a daemon that is gone: {', '.join(sorted(beat.adopted)[:5])}")
    if beat.adopted and alerting is not None:
        await alerting.adopted(beat.adopted)


async def _forget_old(
    config: DaemonConfig, retention_s: float, ingest: Ingest, store: FleetStore | None, say: Callable[[str], None]
) -> None:
    before_s, held = time.time() - retention_s, tuple(live.job.name for live in ingest.jobs if live.job.state != "ended")
    old = set(await asyncio.to_thread(forget_old_files, config.runs_dir, before_s, held))
    if store is not None:
        old |= set(await asyncio.to_thread(store.forget_older, before_s, held))
    if old:
        say(f"removed the records of {len(old)} jobs that are older than {retention_s / 86_400:g} days: {', '.join(sorted(old)[:5])}")
