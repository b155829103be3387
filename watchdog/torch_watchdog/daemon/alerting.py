"""Between the daemon's jobs and the desk that alerts: jobs' incidents in, links and names added, open alerts kept beside each job's files.

Owns which facts of a job an alert gets, `alerts.json` of each run directory, and the alert for a job whose nodes have gone silent. Runs on the
daemon's loop; files are written by the store's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_watchdog.alerts.alert import JOB_SILENT, lineage_of
from torch_watchdog.alerts.desk import AlertDesk, JobFacts
from torch_watchdog.alerts.receivers import receiver_of
from torch_watchdog.alerts.routes import Match, Silence
from torch_watchdog.alerts.sender import AlertSender
from torch_watchdog.alerts.silent import Awaited, Silent, silence_alert, silence_key
from torch_watchdog.daemon.config import AlertsConfig
from torch_watchdog.daemon.going_on import going_on_lines
from torch_watchdog.daemon.live_job import LiveJob
from torch_watchdog.errors import JobElsewhereError, StoreError
from torch_watchdog.launch.summary import goes_on_from
from torch_watchdog.store.alerts import all_saved_alerts, saved_alerts
from torch_watchdog.store.background import BackgroundWriter
from torch_watchdog.store.left_running import has_ended, runs_left_running
from torch_watchdog.store.record import json_record
from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog.threads import Threads
from torch_watchdog_proto.address import is_loopback, split

if TYPE_CHECKING:
    from torch_watchdog.store.fleet import FleetStore

__all__ = ["Alerting"]

_LAST_WORDS_S = 5.0
_MAX_THREADS = 4


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
        self.asked: tuple[str, ...] = ("--dir", str(runs_dir.absolute()))  # whoever reads it may stand anywhere
        # Runs that had not ended when this daemon came, and since when it waits for a word of theirs.
        self._awaited: dict[str, tuple[float, Awaited]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._threads = Threads("alerts", _MAX_THREADS)
        self.desk = AlertDesk(config.routes, {receiver.name: receiver.rules for receiver in receivers})
        for silence in config.silences:
            self.desk.silence(silence, clock())
        self.sender = AlertSender(self.desk, receivers, clock=clock, say=say, log=log, keep=self._keep_changed)

    def is_at(self, addresses: Sequence[str]) -> None:
        """What a person is to type asks this daemon where it has an address: one that other machines know, else one of this machine only.

        A launch's own has none that stays: it is found in the folder of its runs.
        """
        if self._config.restores_all:
            known = sorted((address for address in addresses if _can_be_called(address)), key=_is_for_this_machine_only)
            self.asked = ("--daemon", known[0]) if known else self.asked

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sends while the body runs; its last words are sent within a bounded time."""
        if self._config.restores_all:
            self.desk.restore(await self._threads.run(lambda: all_saved_alerts(self._runs_dir, take=self._takes)))
            self._ask(self._await_left())  # beside the start: a record of weeks takes a while to read
        task = asyncio.create_task(self.sender.run())
        try:
            yield
        finally:
            for one in (task, *self._asking):
                one.cancel()
            await asyncio.wait((task, *self._asking))
            await self.sender.finish(_LAST_WORDS_S, last_words=self._config.last_words)
            self._threads.close()
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
        self._awaited.pop(live.job.name, None)
        self.desk.restore(saved)
        for incident in live.job.incidents:
            if incident["status"] == "firing":
                self.desk.incident(incident, self._facts(live), self._clock())
        self._changed()

    def incident(self, live: LiveJob, incident: Mapping[str, Any]) -> None:
        self.desk.incident(incident, self._facts(live), self._clock())
        self._changed()

    def event(self, live: LiveJob, event: Mapping[str, Any]) -> None:
        """Nothing: who is paged is told of incidents."""

    def reported(self, live: LiveJob, *, trains: bool) -> None:
        """A node has reported; `trains`: steps, so that what the training died of before is over."""
        if trains and any(alert.training_job == self._training_job(live.job.name) for alert in self.desk.open_alerts):
            self.desk.trains(self._facts(live), self._clock())
            self._changed()

    def left(self, live: LiveJob) -> None:
        """Nothing: what it left open is told of all the same."""

    def given_up(self, live: LiveJob) -> None:
        """Another daemon tells of it from now on."""
        self._awaited.pop(live.job.name, None)
        self.desk.forget(live.job.name)

    async def adopted(self, jobs: Collection[str]) -> None:
        """Jobs of a daemon that is gone: what it had open is told on from here."""
        for job in sorted(jobs):
            self.desk.restore(await self._threads.run(functools.partial(saved_alerts, self._runs_dir, job)))
        await self._await_left(jobs)
        self._changed()

    async def _await_left(self, jobs: Collection[str] | None = None) -> None:
        """Runs that an earlier daemon left running. One that has reported here meanwhile is dropped with the next tick."""
        for run in await self._threads.run(lambda: runs_left_running(self._runs_dir, now_s=time.time(), names=jobs)):
            self._awaited.setdefault(run.job, (self._clock(), run))

    def _ask(self, question: Coroutine[Any, Any, None]) -> None:
        """Beside everything else, and ended with it."""
        asking = asyncio.create_task(question)
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    def tick(self, jobs: Sequence[LiveJob]) -> None:
        """Jobs whose nodes are gone without a goodbye. Of one training its newest run counts: an older one may never say more."""
        now, newest = self._clock(), {self._training_job(live.job.name): live for live in jobs}
        told = {alert.key for alert in self.desk.open_alerts}
        for training_job, live in newest.items():
            silent = live.silent_nodes(now, self._config.silent_s) if live.job.state != "ended" else ()
            key = silence_key(training_job)
            if silent and key not in told:
                status = live.job.status()
                self._silent(
                    Silent(job=status.job, training_job=training_job, attempt=status.attempt, nodes=len(status.nodes), silent=silent), now
                )
            elif key in told and not silent:
                over = "has ended" if live.job.state == "ended" else "reports again"
                self.desk.settled(key, now, why=f"{live.job.name} {over}")
                self._changed()
        self._tick_awaited(newest, now)

    def _tick_awaited(self, newest: Collection[str], now: float) -> None:
        for job, (since_s, run) in list(self._awaited.items()):
            over, goes_on = now - since_s >= self._config.silent_s, self._training_job(job) in newest
            if over or goes_on:
                self._awaited.pop(job)
            if over and not goes_on:
                self._ask(self._tell_left(run))

    async def _tell_left(self, run: Awaited) -> None:
        """A run that did not come back, unless it has ended or is at another daemon by now. It stands until its training goes on."""
        if await self._threads.run(lambda: has_ended(self._runs_dir / run.job)):
            return
        if await self._threads.run(lambda: self._takes(run.job)):
            training_job, nodes = self._training_job(run.job), len(run.nodes)
            found = Silent(job=run.job, training_job=training_job, attempt=run.attempt, nodes=nodes, silent=run.nodes, was_left=True)
            self._silent(found, self._clock(), stands=True)

    def _silent(self, found: Silent, now: float, *, stands: bool = False) -> None:
        page, runbook = self._job_page(found.job), self._runbook(JOB_SILENT)
        alert = silence_alert(found, silent_s=self._config.silent_s, now=now, page=page, runbook=runbook, asked=self.asked)
        self.desk.raised(alert, now, stands=stands)
        self._changed()

    # What people say

    def acknowledge(self, name: str, by: str) -> bool:
        taken = self.desk.acknowledge(name, by, self._clock()) is not None
        self._changed()
        return taken

    async def told_by(self, job: str) -> str | None:
        """The other daemon that tells of the job, as far as the store says."""
        if self._store is None:
            return None
        try:
            return await self._threads.run(functools.partial(self._store.elsewhere.owner, job))
        except StoreError:
            return None

    def silence(self, match: Match, seconds: float, by: str, comment: str) -> Silence:
        silence = Silence(match=match, until_s=self._clock() + seconds, by=by, comment=comment)
        self.desk.silence(silence, self._clock())
        self._changed()
        return silence

    def listed(self, sees: Callable[[str], bool] = lambda _: True) -> list[dict[str, Any]]:
        """What is open of the jobs that the caller sees."""
        return [asdict(alert) | {"name": alert.name} for alert in self.desk.open_alerts if sees(alert.job)]

    def silences(self, sees: Callable[[str], bool] = lambda _: True) -> list[dict[str, Any]]:
        """Those that name a job or pattern that the caller sees, are for all jobs, or keep quiet an alert that the caller sees: others' are not its own."""
        seen = [alert for alert in self.desk.open_alerts if sees(alert.job)]
        return [
            asdict(silence)
            for silence in self.desk.silences
            if not silence.match.jobs or any(map(sees, silence.match.jobs)) or any(map(silence.match.fits, seen))
        ]

    # Inside

    def _training_job(self, job: str) -> str:
        return lineage_of(job, lambda name: (self._runs_dir / name).is_dir())

    def _facts(self, live: LiveJob) -> JobFacts:
        status = live.job.status()
        return JobFacts(
            job=status.job, training_job=self._training_job(live.job.name), attempt=status.attempt, world_size=status.world_size,
            ended=status.state == "ended", exit_code=status.exit_code, page=self._page, runbook=self._runbook, asked=self.asked,
            exit_codes=self._config.exit_codes, outlived=self._config.restores_all,
            resume=lambda incident: self._to_go_on(live, incident, ended=status.state == "ended"),
        )  # fmt: skip

    def _to_go_on(self, live: LiveJob, incident: Mapping[str, Any], *, ended: bool) -> Sequence[str]:
        """Nothing where the launch keeps its record where this daemon does not see it."""
        checkpoint = goes_on_from(incident, live.job.incidents, ended=ended)
        return going_on_lines(RunDirectory(self._runs_dir / live.job.name), checkpoint) if checkpoint else ()

    def _page(self, job: str, incident: str) -> str | None:
        return f"{self._job_page(job)}/incidents/{incident}" if self.page_url else None

    def _job_page(self, job: str) -> str | None:
        return f"{self.page_url.rstrip('/')}/jobs/{job}" if self.page_url else None

    def _runbook(self, kind: str) -> str | None:
        if self._config.runbook_url:
            return self._config.runbook_url.replace("{kind}", kind)
        return f"{self.page_url.rstrip('/')}/runbooks/{kind}" if self.page_url else None

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


def _can_be_called(address: str) -> bool:
    host, port = split(address)
    return not port or host not in ("0.0.0.0", "::")  # noqa: S104 - every address is none to call


def _is_for_this_machine_only(address: str) -> bool:
    host, port = split(address)
    return not port or is_loopback(host)
