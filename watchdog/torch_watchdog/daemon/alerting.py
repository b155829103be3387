"""Between the daemon's jobs and the desk that alerts: jobs' incidents in, links and names added, open alerts kept beside each job's files.

Owns which facts of a job an alert gets, `alerts.json` of each run directory, and the alert for a job whose nodes have gone silent. Runs on the
daemon's loop; files are written by the store's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog.alerts.alert import JOB_SILENT, Alert, lineage_of
from torch_watchdog.alerts.desk import AlertDesk, JobFacts
from torch_watchdog.alerts.receivers import receiver_of
from torch_watchdog.alerts.routes import Match, Silence
from torch_watchdog.alerts.sender import AlertSender
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog.daemon.live_job import LiveJob
from torch_watchdog.errors import JobElsewhereError, StoreError
from torch_watchdog.store.alerts import all_saved_alerts, saved_alerts
from torch_watchdog.store.background import BackgroundWriter
from torch_watchdog.store.record import json_record
from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog_proto.address import is_loopback, split

if TYPE_CHECKING:
    from torch_watchdog.store.fleet import FleetStore

__all__ = ["Alerting"]

_LAST_WORDS_S = 5.0
_MAX_NAMED_NODES = 5


class Alerting:
    """What a LiveJob tells it: `incident`, `reported`, `opened`; what the clock does: `tick`."""

    def __init__(
        self,
        config: AlertsConfig,
        runs_dir: Path,
        *,
        writer: BackgroundWriter,
        clock: Callable[[], float],
        say: Callable[[str], None],
        log: Callable[[str], None],
        store: FleetStore | None = None,
    ) -> None:
        """`log` gets a line for each delivery, `say` only what a person must know. Raises ConfigError for a receiver that is none."""
        receivers = [receiver_of(name, url, resend_s=config.resend_s) for name, url in config.receivers.items()]
        self._config, self._runs_dir, self._writer, self._clock, self._store = config, runs_dir, writer, clock, store
        self.page_url: str | None = config.public_url
        self.address: str | None = None
        self.desk = AlertDesk(config.routes, {receiver.name: receiver.rules for receiver in receivers})
        for silence in config.silences:
            self.desk.silence(silence, clock())
        self.sender = AlertSender(self.desk, receivers, clock=clock, say=say, log=log, keep=self._keep_changed)

    def is_at(self, addresses: Sequence[str]) -> None:
        """What a person is to type says this daemon's address, where it is one of its own that other machines know."""
        if self._config.restores_all:
            self.address = next((address for address in addresses if _is_for_others(address)), None)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sends while the body runs; its last words are sent within a bounded time."""
        self.desk.restore(await asyncio.to_thread(all_saved_alerts, self._runs_dir, take=self._takes) if self._config.restores_all else ())
        task = asyncio.create_task(self.sender.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            await self.sender.finish(_LAST_WORDS_S, last_words=self._config.last_words)
            self._keep_changed()

    def _takes(self, job: str) -> bool:
        """Whether an alert that an earlier daemon left in this folder is told from here. Another daemon may tell of it by now."""
        try:
            if self._store is not None:
                self._store.open_run(job)
        except JobElsewhereError:
            return False
        except (StoreError, OSError):
            pass  # told twice is better than not at all, and under the same key
        return True

    # What happens to jobs

    def opened(self, live: LiveJob, saved: Sequence[Mapping[str, Any]]) -> None:
        """A job begins, or is found again with what an earlier daemon left of it; it may have died between an incident and its alert."""
        self.desk.restore(saved)
        for incident in live.job.incidents:
            if incident["status"] == "firing":
                self.desk.incident(incident, self._facts(live), self._clock())
        self._changed()

    def incident(self, live: LiveJob, incident: Mapping[str, Any]) -> None:
        self.desk.incident(incident, self._facts(live), self._clock())
        self._changed()

    def reported(self, live: LiveJob, *, trains: bool) -> None:
        """A node has reported; `trains`: steps, so that what the training died of before is over."""
        if trains and any(alert.training_job == self._training_job(live) for alert in self.desk.open_alerts):
            self.desk.trains(self._facts(live), self._clock())
            self._changed()

    def left(self, live: LiveJob) -> None:
        """Nothing: what it left open is told of all the same."""

    def given_up(self, live: LiveJob) -> None:
        """Another daemon tells of it from now on."""
        self.desk.forget(live.job.name)

    async def adopted(self, jobs: Collection[str]) -> None:
        """Jobs of a daemon that is gone: what it had open is told on from here."""
        for job in sorted(jobs):
            self.desk.restore(await asyncio.to_thread(saved_alerts, self._runs_dir, job))
        self._changed()

    def tick(self, jobs: Sequence[LiveJob]) -> None:
        """Jobs whose nodes are gone without a goodbye."""
        now = self._clock()
        for live in jobs:
            silent = live.silent_nodes(now, self._config.silent_s) if live.job.state != "ended" else ()
            key = _silence_key(self._training_job(live))
            is_told = any(alert.key == key for alert in self.desk.open_alerts)
            if silent and not is_told:
                self.desk.raised(self._silent_job(live, silent, key, now), now)
                self._changed()
            elif is_told and not silent:
                self.desk.settled(key, now)
                self._changed()

    # What people say

    def acknowledge(self, name: str, by: str) -> bool:
        taken = self.desk.acknowledge(name, by, self._clock()) is not None
        self._changed()
        return taken

    def silence(self, match: Match, seconds: float, by: str, comment: str) -> Silence:
        silence = Silence(match=match, until_s=self._clock() + seconds, by=by, comment=comment)
        self.desk.silence(silence, self._clock())
        self._changed()
        return silence

    def listed(self) -> list[dict[str, Any]]:
        return [asdict(alert) | {"name": alert.name} for alert in self.desk.open_alerts]

    # Inside

    def _training_job(self, live: LiveJob) -> str:
        return lineage_of(live.job.name, lambda name: (self._runs_dir / name).is_dir())

    def _facts(self, live: LiveJob) -> JobFacts:
        status = live.job.status()
        return JobFacts(
            job=status.job, training_job=self._training_job(live), attempt=status.attempt, world_size=status.world_size,
            ended=status.state == "ended", exit_code=status.exit_code, page=self._page, runbook=self._runbook, daemon=self.address,
        )  # fmt: skip

    def _page(self, job: str, incident: str) -> str | None:
        return f"{self.page_url.rstrip('/')}/jobs/{job}/incidents/{incident}" if self.page_url else None

    def _runbook(self, kind: str) -> str | None:
        if self._config.runbook_url:
            return self._config.runbook_url.replace("{kind}", kind)
        return f"{self.page_url.rstrip('/')}/runbooks/{kind}" if self.page_url else None

    def _silent_job(self, live: LiveJob, silent: Sequence[str], key: str, now: float) -> Alert:
        named = ", ".join(silent[:_MAX_NAMED_NODES]) + (
            f" and {len(silent) - _MAX_NAMED_NODES} more" if len(silent) > _MAX_NAMED_NODES else ""
        )
        kind, page = JOB_SILENT, self._page(live.job.name, "").removesuffix("/incidents/") if self.page_url else None  # type: ignore[union-attr]
        lines = (
            f"no word from {named} for {self._config.silent_s:.0f} s, and no goodbye",
            "done: nothing: ranks train on without the daemon, if they are there",
            f"look: watchdog status {live.job.name}{f' --daemon {self.address}' if self.address else ''}, then the scheduler: is the job there, are the nodes?",
        )
        runbook = self._runbook(kind)
        return Alert(
            key=key, training_job=self._training_job(live), job=live.job.name, attempt=live.job.status().attempt, incident="silent", kind=kind,
            severity="critical", title=f"{live.job.name}: {len(silent)} of {len(live.job.status().nodes)} nodes silent",
            lines=(*lines, *((f"page: {page}",) if page else ()), *((f"help: {runbook}",) if runbook else ())), starts_s=now, page=page, runbook=runbook,
        )  # fmt: skip

    def _changed(self) -> None:
        self._keep_changed()
        self.sender.wake()

    def _keep_changed(self) -> None:
        for job in self.desk.changed_jobs():
            saved = {"schema_version": 1, "alerts": self.desk.saved(job)}
            path = RunDirectory(self._runs_dir / job).alerts_file
            self._keep(job, path, saved)

    def _keep(self, job: str, path: Path, saved: dict[str, Any]) -> None:
        store = self._store
        done = None if store is None else lambda: store.keep(json_record(job, "alerts", "", saved))
        self._writer.submit(lambda: write_json(path, saved), done)


def _silence_key(training_job: str) -> str:
    return hashlib.sha256(f"{training_job}\0{JOB_SILENT}".encode()).hexdigest()[:16]


def _is_for_others(address: str) -> bool:
    host, port = split(address)
    return bool(port) and not is_loopback(host) and host not in ("0.0.0.0", "::")  # noqa: S104 - every address is none to call
