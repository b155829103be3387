"""START HERE for what a job is: events of its nodes and ranks in, orders, incidents and timeline lines out.

Owns one job: its nodes, its incidents, and the newest attempt, which has the ranks and the order under way. Pure: `now` is seconds since the epoch and
only ever grows; no clock, file, socket or log. An event of an older attempt, or one that was seen before, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch_watchdog.job.attempt import Attempt
from torch_watchdog.job.casebook import Casebook
from torch_watchdog.job.event_log import EventLog
from torch_watchdog.job.events import (
    AppendEvent,
    Effect,
    Event,
    NodeAway,
    NodeJoined,
    NodeLeft,
    OrderRequested,
    RankGone,
    RankSpoke,
    Refused,
    ReportCame,
    Tick,
    WriteIncident,
    WriteStacks,
)
from torch_watchdog.job.health import NO_CODES, Health
from torch_watchdog.job.incident import is_order
from torch_watchdog.job.loaders import LoaderLooks, words_of_loader
from torch_watchdog.job.orders import Shared
from torch_watchdog.rules.assertions import Catalogue
from torch_watchdog.rules.death import NOTHING_KNOWN
from torch_watchdog.rules.xid import XidCode
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import GoodbyeAck, JobStatus

__all__ = ["Job"]

_MAX_TOLD = 100


class Job:
    """One launch, over all its attempts."""

    def __init__(
        self,
        hello: m.NodeHello,
        *,
        started_s: float,
        grace_s: float = 300.0,
        incidents: Iterable[Mapping[str, Any]] = (),
        events: Iterable[Mapping[str, Any]] = (),
        assertions: Catalogue = NOTHING_KNOWN,
        codes: Mapping[int, XidCode] = NO_CODES,
    ) -> None:
        """`incidents` and `events`: what an earlier daemon left of this launch on disk. `codes`: the catalogue of Xid codes."""
        self.name, self.session, self.policy = hello.job, hello.session, hello.policy
        self.rendezvous, self.host = hello.rendezvous, hello.node
        self._run_dir, self._started_s = hello.run_dir, started_s
        self._nodes: dict[str, m.NodeGoodbye | None] = {}
        self._away: set[str] = set()
        self._folders = {hello.node: hello.run_dir}
        self._casebook = Casebook(job=hello.job, policy=hello.policy, folders=self._folders, incidents=incidents, assertions=assertions)
        self._health = Health(codes=codes, changes=hello.rules)
        self._log = EventLog(events)
        self._shared = Shared(
            policy=hello.policy, checkpoints_dir=f"{hello.run_dir}/checkpoints", grace_s=grace_s, casebook=self._casebook, log=self._log,
            away=self._away, rules=hello.rules, max_skips=hello.max_skips,
        )  # fmt: skip
        self._attempt = Attempt(0, self._shared)
        self._loaders = LoaderLooks()
        self._lost_records = 0
        self._dropped: dict[str, int] = {}  # node -> reports

    # What others look at

    @property
    def incidents(self) -> tuple[Mapping[str, Any], ...]:
        return self._casebook.incidents

    @property
    def state(self) -> Literal["running", "stopping", "ended"]:
        if self._all_left():
            return "ended"
        return "stopping" if self._attempt.order_open or self._attempt.ending.is_stopping else "running"

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def has_left(self, node: str) -> bool:
        """Whether the node has said goodbye."""
        return self._nodes.get(node) is not None

    def status(self) -> JobStatus:
        faults = sum(not is_order(found) for found in self.incidents)
        attempt = self._attempt
        return JobStatus(
            job=self.name, state=self.state, policy=self.policy, attempt=attempt.number, world_size=attempt.world_size, run_dir=self._run_dir,
            started_s=self._started_s, nodes=tuple(self._nodes), incidents=faults, lost_records=self._lost_records,
            exit_code=self._final_exit_code(), ranks=attempt.statuses(),
            standstill=attempt.standstill,
        )  # fmt: skip

    def outcome(self) -> GoodbyeAck:
        """What a node process is told when it says goodbye: the first incidents are enough, all of them are on disk."""
        lines = [f"{self._lost_records} step records were overwritten before they could be read"] if self._lost_records else []
        lines += [f"{count} reports of {node} did not fit while the daemon was away" for node, count in self._dropped.items()]
        lines += self._attempt.ending.lines()
        return GoodbyeAck(exit_code=self._exit_code(), incidents=self.incidents[:_MAX_TOLD], lines=tuple(lines))

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""
        return min((t for t in (self._attempt.deadline(), self._health.deadline) if t is not None), default=None)

    # Events

    def handle(self, event: Event, *, now: float) -> tuple[Effect, ...]:
        """Takes one event; returns what to do, in order."""
        match event:
            case NodeJoined():
                return self._on_joined(event.hello, now)
            case NodeAway():
                return self._on_away(event.node, now)
            case ReportCame():
                return self._on_report(event.node, event.report, now)
            case RankSpoke():
                return self._on_spoke(event, now)
            case RankGone():
                return self._on_gone(event, now)
            case NodeLeft():
                return self._on_left(event, now)
            case OrderRequested():
                return self._on_requested(event, now)
            case Tick():
                return (*self._attempt.tick(now), *self._judge(now))

    def _on_joined(self, hello: m.NodeHello, now: float) -> tuple[Effect, ...]:
        self._attempt.node_back(hello.node, now)
        if hello.node in self._away:
            self._away.discard(hello.node)
            return (self._event(now, "node.back", text=f"node {hello.node} reports again", node=hello.node),)
        if hello.node in self._nodes:
            return ()
        self._nodes[hello.node], self._folders[hello.node] = None, hello.run_dir
        text = f"node {hello.node} reports (torch-watchdog {hello.version})"
        return (self._event(now, "node.joined", text=text, node=hello.node, run_dir=hello.run_dir),)

    def _on_away(self, node: str, now: float) -> tuple[Effect, ...]:
        if node not in self._nodes or self.has_left(node):
            return ()
        self._away.add(node)
        gone = self._event(now, "node.away", text=f"node {node} cannot be reached any more: its ranks go on unwatched", node=node)
        return (gone, *self._attempt.node_away(node, now))

    def _all_left(self) -> bool:
        """Whether every node has said goodbye, but for those that cannot be reached any more."""
        left = [node for node, goodbye in self._nodes.items() if goodbye is not None]
        return bool(left) and self._nodes.keys() <= {*left, *self._away}

    def _on_report(self, node: str, report: m.NodeReport, now: float) -> tuple[Effect, ...]:
        effects: list[Effect] = [*self._count_dropped(node, report.dropped_reports, now)]
        for block in report.steps.blocks(tensors=False):
            effects += self._begin_attempt(block.attempt, now)
            if block.attempt == self._attempt.number:
                self._attempt.record(node, block, now)
                self._lost_records += block.lost_records
        self._health.take_steps(report.steps.of_attempt(self._attempt.number), now)
        for event in report.events:
            effects += self._begin_attempt(event.attempt, now)
            if event.attempt == self._attempt.number:
                effects += self._attempt.rank_event(node, event, now)
                effects += self._on_workers(event) if event.kind == "workers" else ()
        for sample in report.gpus:
            self._health.take_gpu(node, sample, now)
        return (*effects, *self._judge(now))

    def _count_dropped(self, node: str, dropped: int, now: float) -> Iterable[Effect]:
        before = self._dropped.get(node, 0)
        if dropped > before:
            self._dropped[node] = dropped
            yield self._event(
                now, "node.dropped", text=f"{dropped - before} reports of {node} did not fit while the daemon was away", node=node
            )

    def _on_spoke(self, spoke: RankSpoke, now: float) -> tuple[Effect, ...]:
        hello = spoke.message
        begun = self._begin_attempt(spoke.attempt, now, world_size=hello.world_size) if isinstance(hello, m.RankHello) else ()
        if spoke.attempt != self._attempt.number:
            return tuple(begun)
        return (*begun, *self._attempt.spoke(spoke, now), *self._judge(now))

    def _on_gone(self, gone: RankGone, now: float) -> tuple[Effect, ...]:
        if gone.attempt != self._attempt.number:
            return ()
        return (*self._attempt.gone(gone.rank, gone.pid, now), *self._judge(now))

    def _on_left(self, event: NodeLeft, now: float) -> tuple[Effect, ...]:
        if self.has_left(event.node):
            return ()
        self._nodes[event.node] = event.goodbye
        effects: list[Effect] = [
            self._event(now, "node.left", text=f"the command on {event.node} ended", exit_code=event.goodbye.exit_code)
        ]
        effects += self._attempt.node_left(event.node, event.goodbye, now)
        effects += self._judge(now, at_end=self._all_left())
        changed = self._casebook.ended(self._exit_code(), self._attempt.ranks) if self.state == "ended" else ()
        return (*effects, *(WriteIncident(incident=incident, contract_of_rank=None) for incident in changed))

    def _on_requested(self, event: OrderRequested, now: float) -> tuple[Effect, ...]:
        if self.state == "ended":
            return (Refused(reason="the job has ended"),)
        return tuple(self._attempt.requested(event, now))

    def _begin_attempt(self, number: int, now: float, *, world_size: int = 0) -> Sequence[Effect]:
        """The launcher has started the ranks anew: nothing of the old ones may leak into their state. `world_size`: as one of them says.

        An elastic launch that has got or lost a node starts other ranks under the same number.
        """
        before = self._attempt
        is_of_another_size = number == before.number and world_size > 0 and before.gives_way_to(world_size)
        if number <= before.number and not is_of_another_size:
            return ()
        self._attempt = Attempt(number, self._shared, world_size=world_size or before.world_size)
        self._health.begin_attempt()
        self._loaders = LoaderLooks()
        self._casebook.begin_attempt(number)
        now_of = f", of {world_size} ranks now" if is_of_another_size else ""
        return (self._event(now, "attempt.started", text=f"the launcher started the ranks again: attempt {number}{now_of}"),)

    # Judging

    def _judge(self, now: float, *, at_end: bool = False) -> Iterable[Effect]:
        return (*self._attempt.judge(now, at_end=at_end), *self._judge_health(now, at_end))

    def _judge_health(self, now: float, at_end: bool) -> Iterable[Effect]:
        findings = self._health.findings(now, at_end=at_end)
        failure = self._health.failed()
        if failure is not None:
            yield self._event(
                now, "rules.failed", text=f"the rules have ended by a mistake of ours ({failure}); orders and failures are judged as before"
            )
        for finding in findings:
            changed = self._casebook.ruled(finding, self._attempt.ranks, now)
            if changed is not None:
                kind = "incident" if finding.change == "fires" else "incident.over"
                sign = finding.sign
                yield self._event(now, kind, rank=sign.rank, step=sign.step, text=changed["summary"], incident=changed["id"])
                yield WriteIncident(incident=changed, contract_of_rank=None)
                whom = self._loaders.whom_to_ask(changed) if finding.change == "fires" else None
                if whom is not None:
                    yield from self._attempt.ask_node(whom)

    def _on_workers(self, event: m.RankEvent) -> Iterable[Effect]:
        incident_id = self._loaders.incident_of(event.rank)
        changed = None if incident_id is None else self._casebook.looked_into(incident_id, words_of_loader(event.text))
        if changed is not None:
            self._loaders.answered(event.rank)
            yield WriteIncident(incident=changed, contract_of_rank=None)
            yield WriteStacks(incident_id=changed["id"], text=event.text)

    def _exit_code(self) -> int | None:
        """None: the command's own code stands."""
        return self._attempt.ending.exit_code(
            failed=any(goodbye is not None and goodbye.exit_code != 0 for goodbye in self._nodes.values()), observed=self.policy == "observe",
            bad_batch=self._casebook.prevented_bad_batch(), of_health=self._health.exit_code,
        )  # fmt: skip

    def _final_exit_code(self) -> int | None:
        """Ours, or else the wrapped commands' own once all have ended: the highest, as `srun` has it."""
        own = [goodbye.exit_code for goodbye in self._nodes.values() if goodbye is not None]
        decided = self._exit_code()
        return max(own) if decided is None and self.state == "ended" else decided

    def _event(self, now: float, kind: str, *, text: str, **more: Any) -> AppendEvent:
        return self._log.line(now, kind, attempt=self._attempt.number, text=text, **more)
