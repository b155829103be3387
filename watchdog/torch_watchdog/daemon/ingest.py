"""Who may report: hellos are checked here, and lead to a job that is live, new, or found again on disk.

Owns the daemon's jobs by name. Knows nothing of gRPC: the services call it with messages and answer what it raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

from torch_watchdog.daemon.config import DaemonConfig
from torch_watchdog.daemon.counters import Counters
from torch_watchdog.daemon.live_job import JobListener, LiveJob, ReportObserver
from torch_watchdog.errors import (
    BadJobNameError,
    JobNameTakenError,
    JobWaitsForStoreError,
    StoreError,
    TooManyJobsError,
    UnknownJobError,
    VersionSkewError,
)
from torch_watchdog.job.events import NodeJoined, ReportCame, Tick
from torch_watchdog.job.job import Job
from torch_watchdog.knowledge import known_assertions, xid_codes
from torch_watchdog.launch.plan import is_job_name
from torch_watchdog.store.alerts import saved_alerts
from torch_watchdog.store.background import BackgroundWriter
from torch_watchdog.store.past import began_s
from torch_watchdog.store.read import read_events, read_incidents, read_reports
from torch_watchdog.threads import Threads
from torch_watchdog_proto import __version__
from torch_watchdog_proto.envelopes import ControlHello, HelloAck, JoinAnswer, JoinRequest
from torch_watchdog_proto.messages import NodeHello

if TYPE_CHECKING:
    from torch_watchdog.store.fleet import FleetStore

__all__ = ["Ingest", "versions_agree"]

_FoundAgain: TypeAlias = tuple[Job, dict[str, int], Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
_MAX_OPENING = 8


class Ingest:
    """Every job of this daemon. `changed` is called after each event, for whoever waits for the next deadline."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        writer: BackgroundWriter,
        clock: Callable[[], float],
        changed: Callable[[], None],
        counters: Counters,
        listener: JobListener,
        store: FleetStore | None = None,
    ) -> None:
        self._config, self._writer, self._clock, self._changed = config, writer, clock, changed
        self._counters, self._listener, self._store = counters, listener, store
        self.observers: list[ReportObserver] = []  # of every job; whoever shows them adds itself
        self._jobs: dict[str, LiveJob] = {}
        self._opening = WeakValueDictionary[str, asyncio.Lock]()  # of each job that is being opened
        self._threads = Threads("hellos", _MAX_OPENING)

    @property
    def runs_dir(self) -> Path:
        return self._config.runs_dir

    @property
    def jobs(self) -> tuple[LiveJob, ...]:
        return tuple(self._jobs.values())

    @property
    def num_dropped_writes(self) -> int:
        """Records that the disk did not take."""
        return self._writer.num_dropped

    @property
    def is_dropping_writes(self) -> bool:
        """The disk did not take one a short while ago."""
        return self._writer.is_dropping

    def live(self, name: str) -> LiveJob:
        """Raises UnknownJobError."""
        if name not in self._jobs:
            raise UnknownJobError(name, tuple(self._jobs))
        return self._jobs[name]

    async def join(self, hello: NodeHello) -> tuple[LiveJob, HelloAck]:
        """A node begins to report. Raises VersionSkewError, BadJobNameError, JobNameTakenError, TooManyJobsError, JobElsewhereError, JobWaitsForStoreError."""
        check_version(hello.version)
        if not is_job_name(hello.job):
            raise BadJobNameError(hello.job)
        live = self._jobs.get(hello.job) or await self._opened(hello)
        if live.job.session != hello.session:
            raise JobNameTakenError(hello.job, live.run_dir)
        live.handle(NodeJoined(hello=hello))
        return live, HelloAck(next_seq=live.last_seq.get(hello.node, 0) + 1, version=__version__)

    def joined(self, request: JoinRequest) -> JoinAnswer:
        """The newest launch at this rendezvous whose host is here. Raises VersionSkewError, and UnknownJobError as long as there is none."""
        check_version(request.version)
        found = (
            live for live in reversed(self.jobs) if live.job.rendezvous == request.rendezvous != "" and live.is_reporting(live.job.host)
        )
        live = next(found, None)
        if live is None:
            raise UnknownJobError(f"at rendezvous {request.rendezvous[:40]}", tuple(self._jobs))
        job = live.job
        return JoinAnswer(
            job=job.name, session=job.session, node=live.name_for(request.host[:200]), policy=job.policy, run_dir=str(live.run_dir), hosted_by=job.host
        )  # fmt: skip

    def attach(self, hello: ControlHello) -> LiveJob:
        """A node's control stream begins, after its hello here. Raises as `join`, and UnknownJobError."""
        check_version(hello.version)
        live = self.live(hello.job)
        if live.job.session != hello.session:
            raise JobNameTakenError(hello.job, live.run_dir)
        return live

    def tick(self) -> None:
        """Time has passed: every job whose deadline has come is told."""
        for live in self.jobs:
            deadline = live.job.next_deadline()
            if deadline is not None and deadline <= self._clock():
                live.handle(Tick())

    def next_deadline(self) -> float | None:
        deadlines = (live.job.next_deadline() for live in self._jobs.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def give_up(self, name: str, to: str) -> None:
        """Another daemon decides for this job now: its nodes are sent there."""
        live = self._jobs.pop(name, None)
        if live is not None:
            live.taken_by = to
            live.close()
            self._listener.given_up(live)

    def close(self) -> None:
        self._threads.close()
        for live in self.jobs:
            live.close()

    def _check_quota(self, job: str) -> None:
        limit = self._config.max_jobs
        others = sum(live.job.state != "ended" for live in self.jobs) + len(self._opening) - 1
        if limit is not None and others >= limit:
            raise TooManyJobsError(job, limit)

    async def _opened(self, hello: NodeHello) -> LiveJob:
        """One node at a time of a job: one whose files take long to read holds up no other job."""
        lock = self._opening.get(hello.job) or asyncio.Lock()
        self._opening[hello.job] = lock
        async with lock:
            if hello.job not in self._jobs:
                self._check_quota(hello.job)
            return self._jobs.get(hello.job) or await self._open(hello)

    async def _open(self, hello: NodeHello) -> LiveJob:
        run_dir = self._config.runs_dir / hello.job
        # In another thread: a run of weeks takes a while to read, and other jobs wait for their orders.
        job, last_seq, unwritten, saved = await self._threads.run(lambda: self._found_again(hello, run_dir))
        live = LiveJob(
            job, run_dir, last_seq, writer=self._writer, clock=self._clock, changed=self._changed, counters=self._counters,
            listener=self._listener, observers=self.observers, store=self._store, reports_per_s=self._config.reports_per_s,
        )  # fmt: skip
        self._forget_oldest()
        self._jobs[hello.job] = live
        live.write_incidents(unwritten)
        self._listener.opened(live, saved)
        return live

    def _found_again(self, hello: NodeHello, run_dir: Path) -> _FoundAgain:
        """The job as an earlier daemon left it on disk, where one did: it has acted on all this, so it only brings the new job up to date.

        With the newest reports, the incidents that it died before it could write, and the alerts that were open.
        """
        self._claim(hello.job)
        now, last_seq, written, events = self._clock(), dict[str, int](), read_incidents(run_dir), read_events(run_dir)
        job = Job(
            hello, started_s=began_s(events) or now, grace_s=self._config.grace_s, incidents=written, events=events, codes=xid_codes(),
            assertions=known_assertions(),
        )  # fmt: skip
        for node, session, report in read_reports(run_dir):
            if session != hello.session:
                raise JobNameTakenError(hello.job, run_dir)
            last_seq[node] = max(report.seq, last_seq.get(node, 0))
            job.handle(ReportCame(node=node, report=report), now=now)
        unwritten = [found for found in job.incidents if found not in written]
        return job, last_seq, unwritten, saved_alerts(self._config.runs_dir, hello.job)

    def _claim(self, job: str) -> None:
        """Raises JobElsewhereError, JobWaitsForStoreError."""
        if self._store is None:
            return
        try:
            self._store.open_run(job)
        except StoreError as error:
            raise JobWaitsForStoreError(job, error) from error

    def _forget_oldest(self) -> None:
        """Ended jobs are on disk; this many are kept at hand."""
        ended = [name for name, live in self._jobs.items() if live.job.state == "ended"]
        for name in ended[: max(0, len(ended) - self._config.max_ended_jobs)]:
            self._jobs.pop(name).close()


def check_version(theirs: str) -> None:
    """Raises VersionSkewError where their messages may not be ours."""
    if not versions_agree(theirs, __version__):
        raise VersionSkewError(theirs[:40], __version__)


def versions_agree(theirs: str, ours: str) -> bool:
    """Same major version, minor versions at most one apart."""
    try:
        (their_major, their_minor), (our_major, our_minor) = (tuple(map(int, version.split(".")[:2])) for version in (theirs, ours))
    except ValueError:
        return False
    return their_major == our_major and abs(their_minor - our_minor) <= 1
