"""Jobs that begin or come back at one moment: each is opened for itself, and one whose files or store do not answer holds up no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_harness import HELLO

from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.counters import Counters
from torch_watchdog.daemon.ingest import Ingest
from torch_watchdog.daemon.journal import Listeners
from torch_watchdog.errors import TooManyJobsError
from torch_watchdog.store.background import BackgroundWriter


class SlowStore:
    """Answers for the job `slow` only when it may."""

    def __init__(self) -> None:
        self.may, self.asked = threading.Event(), list[str]()

    def open_run(self, run: str) -> None:
        self.asked.append(run)
        if run == "slow":
            self.may.wait()

    def keep(self, record: Any, done: Callable[[], None] | None = None) -> None:
        pass


@pytest.fixture
def store() -> Iterator[SlowStore]:
    made = SlowStore()
    yield made
    made.may.set()


def opening(runs: Path, store: SlowStore, ask: Callable[[Ingest], Awaitable[None]], **more: Any) -> None:
    async def run() -> None:
        writer = BackgroundWriter(max_pending=100, say=print)
        ingest = Ingest(
            DaemonConfig(runs_dir=runs, listen=(), **more), writer=writer, clock=lambda: 1.0, changed=lambda: None, counters=Counters(started_s=0.0),
            listener=Listeners(), store=store,  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            await ask(ingest)
        finally:
            ingest.close()
            writer.close(5.0)

    asyncio.run(run())


def test_a_job_whose_store_does_not_answer_holds_up_neither_a_new_one_nor_one_that_is_there(tmp_path: Path, store: SlowStore) -> None:
    async def ask(ingest: Ingest) -> None:
        await ingest.join(HELLO)
        slow = [asyncio.create_task(ingest.join(replace(HELLO, job="slow", node=node))) for node in ("a", "b")]
        await asyncio.sleep(0)
        for hello in (HELLO, replace(HELLO, job="new")):
            await asyncio.wait_for(ingest.join(hello), 20)
        assert not any(one.done() for one in slow)
        store.may.set()
        (live, _), (same, _) = await asyncio.gather(*slow)
        assert live is same and live.job.nodes == ("a", "b")

    opening(tmp_path, store, ask)
    assert sorted(store.asked) == ["job", "new", "slow"], "two nodes of a job open it once"


def test_jobs_that_are_being_opened_count_for_the_quota(tmp_path: Path, store: SlowStore) -> None:
    async def ask(ingest: Ingest) -> None:
        slow = asyncio.create_task(ingest.join(replace(HELLO, job="slow")))
        await asyncio.sleep(0)
        with pytest.raises(TooManyJobsError):
            await ingest.join(HELLO)
        store.may.set()
        await slow

    opening(tmp_path, store, ask, max_jobs=1)
