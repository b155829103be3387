"""One job as the daemon runs it: the pure Job, its files, and the way back to its nodes.

Owns how each effect is done. Everything here runs on the daemon's event loop and never waits: files are written by the store's thread, orders lie in
an outbox until the node's stream takes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch_watchdog.daemon.counters import Counters
from torch_watchdog.errors import JobElsewhereError
from torch_watchdog.job.events import (
    AppendEvent,
    Effect,
    Event,
    NodeAway,
    NodeLeft,
    Refused,
    ReportCame,
    SendOrder,
    WriteIncident,
    WriteStacks,
)
from torch_watchdog.job.job import Job
from torch_watchdog.numpy_loading import load_numpy
from torch_watchdog.store.background import BackgroundWriter
from torch_watchdog.store.job_files import JobFiles
from torch_watchdog.store.record import Record, event_record, json_record, report_record, stacks_record
from torch_watchdog_proto.envelopes import TellRank
from torch_watchdog_proto.fault_points import reach
from torch_watchdog_proto.messages import NodeReport

if TYPE_CHECKING:
    from torch_watchdog.store.fleet import FleetStore

__all__ = ["JobListener", "LiveJob", "Outbox", "ReportObserver"]

_BURST_S = 5.0  # of reports that a job has saved up
_LOOK_FOR_ROOM_S = 0.2
_MAX_ORDERS = 10_000  # for a node that is away; the oldest give way, because the newest generation is what counts


class Outbox:
    """Orders for one node, in order. An order stays until it has been written to the stream, so that a broken one costs none.

    Whoever writes them to a stream takes them over first: a broken stream may look whole for a while, and must not swallow what is meant for the next.
    """

    def __init__(self) -> None:
        self._orders: deque[TellRank] = deque(maxlen=_MAX_ORDERS)
        self._filled = asyncio.Event()

    def put(self, order: TellRank) -> None:
        self._orders.append(order)
        self._filled.set()

    async def first(self) -> TellRank:
        while not self._orders:
            self._filled.clear()
            await self._filled.wait()
        return self._orders[0]

    def done(self, order: TellRank) -> None:
        if self._orders and self._orders[0] is order:
            self._orders.popleft()

    def taken_over(self) -> Outbox:
        """With all that lies here; this one is empty from now on."""
        new = Outbox()
        for order in self._orders:
            new.put(order)
        self._orders.clear()
        return new


class JobListener(Protocol):
    """Who alerts, and who logs. Called on the loop, after the job itself has been told."""

    def opened(self, live: LiveJob, saved: Sequence[Mapping[str, Any]]) -> None: ...
    def incident(self, live: LiveJob, incident: Mapping[str, Any]) -> None: ...
    def event(self, live: LiveJob, event: Mapping[str, Any]) -> None: ...
    def reported(self, live: LiveJob, *, trains: bool) -> None: ...
    def left(self, live: LiveJob) -> None: ...
    def given_up(self, live: LiveJob) -> None: ...


ReportObserver: TypeAlias = Callable[[str, str, NodeReport], None]  # job, node, and what it reported: on the loop, so it must not wait


class LiveJob:
    """`last_seq` holds the newest report that was taken from each node."""

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        last_seq: dict[str, int],
        *,
        writer: BackgroundWriter,
        clock: Callable[[], float],
        changed: Callable[[], None],
        counters: Counters,
        listener: JobListener,
        observers: Sequence[ReportObserver] = (),
        store: FleetStore | None = None,
        reports_per_s: float | None = None,
    ) -> None:
        self.job, self.run_dir, self.last_seq = job, run_dir, last_seq
        self._files = JobFiles(run_dir)
        self._writer, self._clock, self._changed = writer, clock, changed
        self._counters, self._listener, self._observers, self._store = counters, listener, observers, store
        self.taken_by: str | None = None  # another daemon over the same store decides for it now
        self._report_every_s, self._next_report_s = 1.0 / reports_per_s if reports_per_s else 0.0, 0.0
        self._left_s: dict[str, float] = {}  # node -> when its last stream broke, for those that are away
        self._outboxes: dict[str, Outbox] = {}
        self.num_reporting = 0  # nodes with an open stream
        self._streams = Counter[str]()  # of reports, by node: a new one may begin before the end of a broken one is seen
        self._names: set[str] = set()
        self._someone_left = asyncio.Event()

    def outbox(self, node: str) -> Outbox:
        return self._outboxes.setdefault(node, Outbox())

    def attached(self, node: str) -> Outbox:
        """Of a new stream: an older one of this node gets nothing any more."""
        self._outboxes[node] = self.outbox(node).taken_over()
        return self._outboxes[node]

    def handle(self, event: Event) -> tuple[Effect, ...]:
        """Tells the job, and does what it wants done. Returns the effects, for a caller that waits for a refusal."""
        if self.taken_by is not None:
            return ()  # another daemon writes this job's story now
        effects = self.job.handle(event, now=self._clock())
        for effect in effects:
            self._do(effect)
        if isinstance(event, NodeLeft):
            self._someone_left.set()
            self._listener.left(self)
        self._changed()
        return effects

    @contextlib.contextmanager
    def reporting(self, node: str) -> Iterator[None]:
        """While a stream of this node's reports is open."""
        self._streams[node] += 1
        self.num_reporting += self._streams[node] == 1
        self._left_s.pop(node, None)
        try:
            yield
        finally:
            self._streams[node] -= 1
            if not self._streams[node]:
                self.num_reporting -= 1
                self._left_s[node] = self._clock()
                self.handle(NodeAway(node=node))
                self._someone_left.set()

    def is_reporting(self, node: str) -> bool:
        return self._streams[node] > 0

    async def all_left(self, timeout_s: float) -> None:
        """Returns once every node has said goodbye or is away, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.job.state != "ended":
                    self._someone_left.clear()
                    await self._someone_left.wait()

    def name_for(self, host: str) -> str:
        """Of a node that joins: its host's name, or that with a number where another node has it."""
        taken = {*self.job.nodes, *self._names}
        numbered = (host if number == 1 else f"{host}-{number}" for number in itertools.count(1))
        name = next(name for name in numbered if name not in taken)
        self._names.add(name)
        return name

    def take_report(self, node: str, report: NodeReport, stored: Callable[[], bytes], done: Callable[[], None]) -> None:
        """Keeps the report and judges it, once: a number that was taken before changes nothing. `done` is called once it was written.

        `stored` gives the frame that keeps it, and is asked in the store's thread.
        """
        if report.seq <= self.last_seq.get(node, 0):
            self._counters.repeated_reports += 1
            done()
            return
        self.last_seq[node] = report.seq
        self._counters.reports += 1
        name = self.job.name
        self._keep(lambda: self._files.append_stored(stored()), lambda: report_record(name, node, report.seq, stored()), done)
        if report.steps.rank:
            load_numpy()
        self.handle(ReportCame(node=node, report=report))
        for observe in self._observers:
            observe(self.job.name, node, report)
        self._listener.reported(self, trains=bool(report.steps.step))

    async def has_room(self) -> None:
        """Returns once this job may report again and the store takes more: until then the node keeps its reports. Raises JobElsewhereError."""
        if self._report_every_s:
            now = self._clock()
            self._next_report_s = max(now - _BURST_S, self._next_report_s) + self._report_every_s
            await asyncio.sleep(max(0.0, self._next_report_s - now))
        while self._store is not None and self._store.mirror.is_full and self.taken_by is None:
            await asyncio.sleep(_LOOK_FOR_ROOM_S)
        self.check_ours()

    def check_ours(self) -> None:
        """Raises JobElsewhereError."""
        if self.taken_by is not None:
            raise JobElsewhereError(self.job.name, self.taken_by)

    def write_incidents(self, incidents: Sequence[Mapping[str, Any]]) -> None:
        for incident in incidents:
            self._write_incident(incident, None)

    def silent_nodes(self, now: float, silent_s: float) -> tuple[str, ...]:
        """Those whose stream broke so long ago, and which have not said goodbye."""
        gone = (node for node, left_s in self._left_s.items() if now - left_s >= silent_s)
        return tuple(node for node in gone if not self.job.has_left(node))

    def close(self) -> None:
        self._writer.submit(self._files.close)

    def _do(self, effect: Effect) -> None:
        match effect:
            case SendOrder():
                reach("daemon", "before", effect.tell.order)
                self.outbox(effect.node).put(effect.tell)
            case WriteIncident():
                self._write_incident(effect.incident, effect.contract_of_rank)
                self._listener.incident(self, effect.incident)
            case WriteStacks():
                name = self.job.name
                self._keep(
                    lambda: self._files.write_stacks(effect.incident_id, effect.text),
                    lambda: stacks_record(name, effect.incident_id, effect.text),
                )
            case AppendEvent():
                name = self.job.name
                self._keep(lambda: self._files.append_event(effect.event), lambda: event_record(name, effect.event))
                self._listener.event(self, effect.event)
            case Refused():
                pass  # the caller of handle() answers with it

    def _write_incident(self, incident: Mapping[str, Any], contract_of_rank: int | None) -> None:
        name = self.job.name
        self._keep(
            lambda: self._files.write_incident(incident, contract_of_rank),
            lambda: json_record(name, "incident", str(incident["id"]), incident),
        )

    def _keep(self, work: Callable[[], None], record: Callable[[], Record], done: Callable[[], None] | None = None) -> None:
        """In the run directory, then in the shared store where there is one; then `done`."""
        store = self._store
        self._writer.submit(work, done if store is None else lambda: store.keep(record(), done))
