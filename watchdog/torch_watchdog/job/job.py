"""START HERE for what a job is: events of its nodes and ranks in, orders, incidents and timeline lines out.

Owns one job: its nodes, the ranks of its newest attempt, its incidents and (inside the Coordinator) the order under way. Pure: `now` is seconds
since the epoch and only ever grows; no clock, file, socket or log. An event of an older attempt, or one that was seen before, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch_watchdog.job.casebook import Casebook
from torch_watchdog.job.event_log import EventLog, words_of
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
    SendOrder,
    Tick,
    WriteIncident,
    WriteStacks,
)
from torch_watchdog.job.failures import FailureWatch
from torch_watchdog.job.first_failure import FirstFailure, gave_up
from torch_watchdog.job.hangs import HangWatch, Hung
from torch_watchdog.job.health import NO_CODES, Health
from torch_watchdog.job.incident import is_order
from torch_watchdog.job.losses import LossWatch
from torch_watchdog.job.pace import PaceWatch
from torch_watchdog.job.ranks import RankState
from torch_watchdog.job.rescues import Rescues
from torch_watchdog.job.standstill import AWAY
from torch_watchdog.rules.assertions import Catalogue
from torch_watchdog.rules.death import NOTHING_KNOWN, signal_name
from torch_watchdog.rules.xid import XidCode
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import GoodbyeAck, JobStatus, TellRank
from torch_watchdog_proto.rescue_words import Failed, Look, Looked
from torch_watchdog_proto.stop import events as stop
from torch_watchdog_proto.stop.coordinator import Coordinator
from torch_watchdog_proto.stop.rescue import RankFailed

__all__ = ["Job"]

_MAX_TOLD = 100
_RETRY_S = 1.0  # for an order of a rule that could not be given at once


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
        self._run_dir, self._started_s, self._grace_s = hello.run_dir, started_s, grace_s
        self._nodes: dict[str, m.NodeGoodbye | None] = {}
        self._away: set[str] = set()
        self._attempt = 0
        self._world_size = 0
        self._ranks: dict[int, RankState] = {}
        self._coordinator: Coordinator | None = None
        self._casebook = Casebook(job=hello.job, policy=hello.policy, incidents=incidents, assertions=assertions)
        self._losses, self._failures, self._pace = LossWatch(), FailureWatch(), PaceWatch()
        self._rescues, self._hangs = self._new_rescues(), HangWatch()
        self._health = Health(codes=codes, changes=hello.rules)
        self._first: FirstFailure | None = None  # named; its rescue is still under way
        self._wanted: stop.StopRequested | None = None  # by a rule, not yet given
        self._retry_at = 0.0
        self._preempted = False
        self._order_open = False
        self._why_given_up: str | None = None
        self._leave_codes: dict[int, int] = {}  # generation of an order that tells ranks to leave -> its exit code
        self._left_code: int | None = None  # of the one that ranks have left on
        self._last_closed: stop.Closed | None = None
        self._log = EventLog(events)
        self._stacks = ""
        self._stood_code: int | None = None  # of a standstill that the job ended for
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
        return "stopping" if self._order_open or (self._last_closed is not None and self._last_closed.exit_code is not None) else "running"

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def has_left(self, node: str) -> bool:
        """Whether the node has said goodbye."""
        return self._nodes.get(node) is not None

    def status(self) -> JobStatus:
        faults = sum(not is_order(found) for found in self.incidents)
        return JobStatus(
            job=self.name, state=self.state, policy=self.policy, attempt=self._attempt, world_size=self._world_size, run_dir=self._run_dir,
            started_s=self._started_s, nodes=tuple(self._nodes), incidents=faults, lost_records=self._lost_records,
            exit_code=self._final_exit_code(), ranks=tuple(self._ranks[rank].status() for rank in sorted(self._ranks)),
        )  # fmt: skip

    def outcome(self) -> GoodbyeAck:
        """What a node process is told when it says goodbye: the first incidents are enough, all of them are on disk."""
        lines = [f"{self._lost_records} step records were overwritten before they could be read"] if self._lost_records else []
        lines += [f"{count} reports of {node} did not fit while the daemon was away" for node, count in self._dropped.items()]
        if self._last_closed is not None and stop.NO_CHECKPOINT in self._last_closed.reason:
            lines.append(f"no checkpoint was made: {self._last_closed.reason.partition(stop.NO_CHECKPOINT)[2]}")
        if self._last_closed is None and self._why_given_up is not None:
            lines.append(f"the stop could not be completed: {self._why_given_up}")
        return GoodbyeAck(exit_code=self._exit_code(), incidents=self.incidents[:_MAX_TOLD], lines=tuple(lines))

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""
        order = self._coordinator.next_deadline() if self._coordinator is not None else None
        retry = self._retry_at if self._wanted is not None else None
        watches = (self._losses, self._failures, self._rescues, self._hangs, self._health)
        rules = (watch.deadline for watch in watches)
        return min((t for t in (order, retry, *rules) if t is not None), default=None)

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
                return self._on_gone(event.attempt, event.rank, event.pid, now)
            case NodeLeft():
                return self._on_left(event, now)
            case OrderRequested():
                return self._on_requested(event, now)
            case Tick():
                return self._on_tick(now)

    def _on_joined(self, hello: m.NodeHello, now: float) -> tuple[Effect, ...]:
        if hello.node in self._away:
            self._away.discard(hello.node)
            return (self._event(now, "node.back", text=f"node {hello.node} reports again", node=hello.node),)
        if hello.node in self._nodes:
            return ()
        self._nodes[hello.node] = None
        return (self._event(now, "node.joined", text=f"node {hello.node} reports (torch-watchdog {hello.version})", node=hello.node),)

    def _on_away(self, node: str, now: float) -> tuple[Effect, ...]:
        """Its ranks may train on, unreachable: a request that needs them is refused at once, not after a wait of all the others."""
        if self._nodes.get(node, self) is not None:
            return ()
        self._away.add(node)
        gone = self._event(now, "node.away", text=f"node {node} cannot be reached any more: its ranks go on unwatched", node=node)
        if self._order_open:
            return (gone,)  # its deadline says how long it may stay away
        ranks = [rank.rank for rank in self._ranks.values() if rank.node == node and rank.alive]
        return (gone, *(effect for rank in ranks for effect in self._tell_coordinator(stop.RankGone(rank=rank), now)))

    def _all_left(self) -> bool:
        """Whether every node has said goodbye, but for those that cannot be reached any more."""
        left = [node for node, goodbye in self._nodes.items() if goodbye is not None]
        return bool(left) and self._nodes.keys() <= {*left, *self._away}

    def _on_report(self, node: str, report: m.NodeReport, now: float) -> tuple[Effect, ...]:
        effects: list[Effect] = [*self._count_dropped(node, report.dropped_reports, now)]
        for block in report.blocks:
            effects += self._begin_attempt(block.attempt, now)
            if block.attempt == self._attempt:
                self._record(node, block, now)
        for event in report.events:
            effects += self._begin_attempt(event.attempt, now)
            if event.attempt == self._attempt:
                effects += self._on_rank_event(node, event, now)
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

    def _record(self, node: str, block: m.StepBlock, now: float) -> None:
        self._rank(block.rank, node, block.pid).record(block, now)
        self._lost_records += block.lost_records
        self._losses.see(block, now)
        if block.step or block.micro_step:
            self._hangs.progressed(now, [step_ns / 1e9 for step_ns in block.step_ns])
        self._health.take_block(block, now)
        self._pace.see(block)

    def _on_rank_event(self, node: str, event: m.RankEvent, now: float) -> Iterable[Effect]:
        rank = self._rank(event.rank, node, event.pid)
        yield self._event(
            now, f"rank.{event.kind}", rank=event.rank, text=words_of(event), level=event.level, exit_code=event.exit_code,
            signal=event.signal,
        )  # fmt: skip
        if event.kind == "note" and event.level == "error":
            self._failures.note(event.pid, event.text)
        if event.kind == "log":
            self._failures.log(event.pid, event.text)
        if event.kind == "state":
            self._hangs.state(event.rank, event.text)
            self._failures.state(event.rank, event.text)
        if event.kind == "stack":
            self._hangs.stack(event.rank, event.text)
            self._failures.stack(event.rank, event.text)
        if event.kind == "exited" and event.pid == rank.pid:
            rank.gone()
            rank.exited = True
            yield from self._tell_coordinator(stop.RankGone(rank=event.rank), now)
            yield from self._on_end(rank, event, node, now)

    def _on_end(self, rank: RankState, event: m.RankEvent, node: str, now: float) -> Iterable[Effect]:
        self._rescues.exited(rank.rank, now)
        if not rank.left:
            self._failures.see(event, node, rank.last_step, now)
            if event.exit_code != 0 and not self._failures.is_victim(event.pid):
                yield from self._rescue(rank.rank, words_of(event), now)
        yield from self._tell_each(self._rescues.out(rank.rank, now))

    def _on_spoke(self, spoke: RankSpoke, now: float) -> tuple[Effect, ...]:
        message = spoke.message
        effects: list[Effect] = []
        if isinstance(message, m.RankHello):
            effects += self._begin_attempt(spoke.attempt, now)
            effects += self._on_rank_hello(spoke.node, message, now)
        if spoke.attempt != self._attempt or self._coordinator is None:
            return tuple(effects)
        rank = self._ranks.get(message.rank)
        if rank is None:
            return tuple(effects)
        rank.hear(message, now)
        if isinstance(message, m.Left):
            rank.left = True
            self._left_code = self._leave_codes.get(message.generation, self._left_code)  # a rescue's is none of them
        if isinstance(message, m.RankNote):
            effects.append(self._event(now, "rank.note", rank=message.rank, text=message.text, level=message.level))
        if isinstance(message, m.Signalled):
            effects += self._on_signalled(message, now)
        if isinstance(message, Looked):
            self._hangs.answered(message)
            self._failures.looked(message)
        if isinstance(message, Failed):
            effects += self._on_failed(rank, message, now)
        effects += self._tell_each(self._rescues.said(message, now))
        effects += self._tell_coordinator(stop.FromRank(message=message), now)
        return (*effects, *self._judge(now))

    def _on_failed(self, rank: RankState, failed: Failed, now: float) -> Iterable[Effect]:
        self._failures.raised(failed, node=rank.node, pid=rank.pid, now=now)
        yield self._event(now, "rank.failed", rank=rank.rank, step=failed.step, text=" <- ".join((failed.text, *failed.chain[1:])))
        yield from self._tell_coordinator(stop.RankGone(rank=rank.rank), now)
        if gave_up(failed.text) and not self._rescues.has_begun:  # whom it waited for: told before they are freed from where they are
            alive = self._ranks_in_training() - {rank.rank}
            self._failures.asked(alive)
            yield from self._ask(alive)[1]
            self._say_who_is_away(alive)
        yield from self._rescue(rank.rank, f"rank {rank.rank}: {failed.text}", now, victim=self._failures.is_victim(rank.pid))

    def _ranks_in_training(self) -> frozenset[int]:
        return frozenset(rank.rank for rank in self._ranks.values() if rank.alive and rank.phase != "end")

    def _ask(self, ranks: frozenset[int]) -> tuple[int, list[Effect]]:
        """Where they are: the question's number, and the questions."""
        generation = 0 if self._coordinator is None else self._coordinator.next_generation()
        return generation, self._tell_each(stop.Tell(rank=rank, order=Look(generation=generation)) for rank in sorted(ranks))

    def _on_rank_hello(self, node: str, hello: m.RankHello, now: float) -> Iterable[Effect]:
        if hello.attempt != self._attempt:
            return
        if self._coordinator is None:
            self._world_size = hello.world_size
            self._coordinator = Coordinator(
                world_size=hello.world_size,
                policy=self.policy,
                checkpoints_dir=f"{self._run_dir}/checkpoints",
                grace_s=self._grace_s,
                generation=self._log.last_generation(self._attempt),
            )
        known = self._ranks.get(hello.rank)
        rank = self._rank(hello.rank, node, hello.pid)
        if known is None or known.pid != hello.pid or known.local_rank is None:
            text = f"rank {hello.rank} of {hello.world_size} on {node}, pid {hello.pid}, torch {hello.torch_version}"
            yield self._event(now, "rank.connected", rank=hello.rank, text=text)
        rank.node, rank.pid = node, hello.pid
        self._rescues.rank_here(hello.rank)

    def _on_gone(self, attempt: int, rank: int, pid: int, now: float) -> tuple[Effect, ...]:
        state = self._ranks.get(rank)
        if attempt != self._attempt or state is None or state.pid != pid or not state.alive:
            return ()
        state.gone()
        gone = self._event(now, "rank.gone", rank=rank, text=f"rank {rank} closed its control socket", step=state.last_step)
        told = (*self._tell_coordinator(stop.RankGone(rank=rank), now), *self._tell_each(self._rescues.out(rank, now)))
        return (gone, *told, *self._judge(now))

    def _on_left(self, event: NodeLeft, now: float) -> tuple[Effect, ...]:
        if self._nodes.get(event.node) is not None:
            return ()
        self._nodes[event.node] = event.goodbye
        effects: list[Effect] = [
            self._event(now, "node.left", text=f"the command on {event.node} ended", exit_code=event.goodbye.exit_code)
        ]
        for rank in self._ranks.values():
            if rank.node == event.node and rank.alive:
                rank.gone()
                effects += self._tell_coordinator(stop.RankGone(rank=rank.rank), now)
        self._failures.command_ended(event.goodbye.exit_code, event.goodbye.signal)
        effects += self._judge(now, at_end=self._all_left())
        changed = self._casebook.ended(self._exit_code(), self._ranks) if self.state == "ended" else ()
        return (*effects, *(WriteIncident(incident=incident, contract_of_rank=None) for incident in changed))

    def _on_requested(self, event: OrderRequested, now: float) -> tuple[Effect, ...]:
        if self.state == "ended":
            return (Refused(reason="the job has ended"),)
        if self._coordinator is None:
            return (Refused(reason="no rank has reported yet: try again once the training has begun"),)
        if event.kind == "order.cancel":
            return tuple(self._tell_coordinator(stop.CancelRequested(by=event.by), now))
        reason = event.reason or f"requested by {event.by}"
        leave = event.kind != "order.checkpoint"
        request = stop.StopRequested(kind=event.kind, by=event.by, reason=reason, exit_code=0, save=True, leave=leave)
        return tuple(self._tell_coordinator(request, now))

    def _on_signalled(self, message: m.Signalled, now: float) -> Iterable[Effect]:
        """Whoever takes the machine away signals every rank, or one node's, and perhaps twice: that is one order."""
        if self._preempted or self.policy == "observe" or self._rescues.has_begun:  # the launcher ends what a failure has left
            return
        self._preempted = True
        name = signal_name(message.signal)
        yield self._event(now, "rank.signalled", rank=message.rank, text=f"rank {message.rank} got {name}: the job saves and stops")
        request = stop.StopRequested(kind="order.preemption", by=name, reason=f"{name} from outside", exit_code=128 + message.signal)
        yield from self._want(request, now)

    def _on_tick(self, now: float) -> tuple[Effect, ...]:
        effects = [*self._tell_coordinator(stop.Tick(), now), *self._tell_each(self._rescues.tick(now))]
        effects += self._watch_standstill(now)
        if self._wanted is not None and now >= self._retry_at:
            effects += self._want(self._wanted, now)
        return (*effects, *self._judge(now))

    # Attempts and ranks

    def _begin_attempt(self, attempt: int, now: float) -> Sequence[Effect]:
        """The launcher has started the ranks anew: nothing of the old ones may leak into their state."""
        if attempt <= self._attempt:
            return ()
        self._attempt, self._ranks, self._coordinator = attempt, {}, None
        self._losses, self._failures, self._pace = LossWatch(), FailureWatch(), PaceWatch()
        self._rescues, self._first = self._new_rescues(), None
        self._wanted, self._order_open, self._last_closed, self._preempted = None, False, None, False
        self._leave_codes, self._left_code, self._why_given_up = {}, None, None
        self._hangs, self._stood_code = HangWatch(), None
        self._health.begin_attempt()
        self._casebook.begin_attempt(attempt)
        return (self._event(now, "attempt.started", text=f"the launcher started the ranks again: attempt {attempt}"),)

    def _rank(self, rank: int, node: str, pid: int) -> RankState:
        if rank not in self._ranks:
            self._ranks[rank] = RankState(rank=rank, node=node, pid=pid)
        return self._ranks[rank]

    # The rescue of the others, once a rank has failed

    def _new_rescues(self) -> Rescues:
        return Rescues(checkpoints_dir=f"{self._run_dir}/checkpoints", grace_s=self._grace_s, allowed=self.policy != "observe")

    def _rescue(self, rank: int, reason: str, now: float, *, victim: bool = False) -> Iterable[Effect]:
        if self._coordinator is None:
            return ()
        generation = self._coordinator.next_generation()
        failed = RankFailed(rank=rank, reason=reason, generation=generation, victim=victim)
        return self._tell_each(self._rescues.failed(failed, now))

    def _say_who_is_away(self, ranks: frozenset[int]) -> None:
        for rank in ranks:
            if self._ranks[rank].node in self._away:
                self._hangs.state(rank, AWAY)
                self._failures.state(rank, AWAY)

    def _watch_standstill(self, now: float) -> Iterable[Effect]:
        """Asks the ranks where they are once no step has come for unusually long, and frees them from one that will not come."""
        alive = self._ranks_in_training()
        if self._coordinator is None or self._order_open or self._first is not None or self._rescues.has_begun or len(alive) < 2:
            return ()
        if self._hangs.should_ask(now):
            generation, questions = self._ask(alive)
            self._hangs.asked(alive, generation, now)
            self._say_who_is_away(alive)
            return questions
        hung = self._hangs.verdict(now)
        return () if hung is None else self._on_hung(hung, now)

    def _on_hung(self, hung: Hung, now: float) -> Iterable[Effect]:
        ranks = [self._ranks[rank] for rank in hung.ranks]
        names = ", ".join(str(rank.rank) for rank in ranks)
        text = f"ranks {hung.waiting} wait for rank {names}: {hung.why}" if hung.waiting else f"ranks {names}: {hung.why}"
        yield self._event(now, "rank.late", rank=ranks[0].rank, step=ranks[0].last_step, text=text)
        if not hung.sure:
            return
        for rank in ranks:
            step = None if rank.last_step is None else rank.last_step + 1
            self._failures.hung(rank.rank, node=rank.node, pid=rank.pid, step=step, why=hung.why, now=now, desync=hung.desync)
        self._stacks = hung.stacks
        # Of several that are only in different collectives each holds a whole state: one is ended, another saves.
        yield from self._rescue(ranks[0].rank, f"rank {ranks[0].rank}: {hung.why}", now)
        yield from self._judge(now)

    def _tell_each(self, told: Iterable[stop.Tell]) -> list[Effect]:
        return [effect for tell in told for effect in self._send(tell)]

    # The coordinator

    def _tell_coordinator(self, event: stop.Event, now: float) -> Iterable[Effect]:
        if self._coordinator is None:
            return ()
        effects: list[Effect] = []
        for effect in self._coordinator.handle(event, now=now):
            effects += self._on_stop_effect(effect, now)
        return effects

    def _on_stop_effect(self, effect: stop.Effect, now: float) -> Iterable[Effect]:
        match effect:
            case stop.Tell():
                return self._send(effect)
            case stop.Found():
                return self._on_found(effect, now)
            case stop.Opened():
                return self._on_opened(effect, now)
            case stop.Closed():
                return self._on_closed(effect, now)
            case stop.Refusal():
                text = f"order refused: {effect.reason}"
                return (Refused(reason=effect.reason), self._event(now, "order.refused", text=text))

    def _send(self, tell: stop.Tell) -> Iterable[Effect]:
        if isinstance(tell.order, m.Commit) and tell.order.leave:
            self._leave_codes[tell.order.generation] = tell.order.exit_code
        rank = self._ranks.get(tell.rank)
        if rank is not None:
            yield SendOrder(node=rank.node, tell=TellRank(attempt=self._attempt, rank=tell.rank, order=tell.order))

    def _on_found(self, found: stop.Found, now: float) -> Iterable[Effect]:
        if found.violation.culprit in self._ranks:
            found = replace(found, rank=found.violation.culprit)
        new = self._casebook.found(found, self._ranks, now, world_size=self._world_size)
        if new is not None:
            yield self._event(now, "incident", rank=found.rank, step=found.step, text=new["summary"], incident=new["id"], how=found.how)
            yield WriteIncident(incident=new, contract_of_rank=found.rank)

    def _on_opened(self, opened: stop.Opened, now: float) -> Iterable[Effect]:
        self._order_open, self._wanted = True, None
        text = f"order {opened.generation} ({opened.kind}) begins: {opened.reason}"
        yield self._event(now, "order.opened", text=text, generation=opened.generation, order_kind=opened.kind)
        for changed in self._casebook.opened(opened, self._ranks, now):
            yield WriteIncident(incident=changed, contract_of_rank=None)

    def _on_closed(self, closed: stop.Closed, now: float) -> Iterable[Effect]:
        self._order_open = False
        if closed.outcome == "done":
            self._last_closed = closed
        else:
            self._why_given_up = closed.reason
        ending = "is done" if closed.outcome == "done" else "was given up"
        text = f"order {closed.generation} ({closed.kind}) {ending} after {closed.seconds:.2f} s: {closed.reason}"
        yield self._event(
            now, "order.closed", step=closed.stop_step, text=text, generation=closed.generation, outcome=closed.outcome,
            exit_code=closed.exit_code,
        )  # fmt: skip
        for changed in self._casebook.closed(closed):
            yield WriteIncident(incident=changed, contract_of_rank=None)

    # Rules

    def _judge(self, now: float, *, at_end: bool = False) -> Iterable[Effect]:
        return (*self._judge_losses(now, at_end), *self._judge_failures(now, at_end), *self._judge_health(now, at_end))

    def _judge_health(self, now: float, at_end: bool) -> Iterable[Effect]:
        findings = self._health.findings(now, at_end=at_end)
        failure = self._health.failed()
        if failure is not None:
            yield self._event(
                now, "rules.failed", text=f"the rules have ended by a mistake of ours ({failure}); orders and failures are judged as before"
            )
        for finding in findings:
            changed = self._casebook.ruled(finding, self._ranks, now)
            if changed is not None:
                kind = "incident" if finding.change == "fires" else "incident.over"
                sign = finding.sign
                yield self._event(now, kind, rank=sign.rank, step=sign.step, text=changed["summary"], incident=changed["id"])
                yield WriteIncident(incident=changed, contract_of_rank=None)

    def _judge_losses(self, now: float, at_end: bool) -> Iterable[Effect]:
        if self._losses.deadline is None:
            return ()
        diverged = self._losses.verdict({number: rank.seen_step for number, rank in self._ranks.items()}, now=now, at_end=at_end)
        if diverged is None:
            return ()
        found = self._casebook.diverged(diverged, self._ranks, now, policy=self.policy)
        effects: list[Effect] = [
            self._event(now, "incident", rank=diverged.origin, step=found["step"], text=found["summary"], incident=found["id"]),
            WriteIncident(incident=found, contract_of_rank=None),
        ]
        if self.policy != "observe" and not at_end:
            reason = found["summary"]
            # Parameters may be NaN by now: nothing that is saved here would be good, so nothing is.
            request = stop.StopRequested(
                kind=found["kind"], by=f"rule {found['kind']}", reason=reason, exit_code=m.EXIT_DIVERGED, save=False, leave=True
            )
            effects += self._want(request, now)
        return effects

    def _want(self, request: stop.StopRequested, now: float) -> Iterable[Effect]:
        """An order of a rule: asked again until it can be given, because another order may be under way."""
        self._wanted, self._retry_at = request, now + _RETRY_S
        return [effect for effect in self._tell_coordinator(request, now) if not isinstance(effect, Refused)]

    def _judge_failures(self, now: float, at_end: bool) -> Iterable[Effect]:
        rescue = self._rescues.ended
        known = at_end or all(rank.exited for rank in self._ranks.values()) or (rescue is not None and self._failures.culprit_is_known)
        first = self._failures.verdict(now=now, all_ended=known, skipped=self._pace.skipped())
        effects: list[Effect] = [] if first is None else self._name(first, now)
        if self._first is not None and (rescue is not None or at_end):
            changed = None if rescue is None else self._casebook.rescued(rescue, exit_code=self._stood_code)
            effects += [WriteIncident(incident=changed, contract_of_rank=None)] if changed is not None else []
            for rank in (rank for rank in self._ranks.values() if rank.node in self._away):
                self._rescues.exited(rank.rank, now)  # its end will not be seen: nobody waits for it
            effects += self._tell_each(self._rescues.judged(self._first, now=now))
            self._first = None
        return effects

    def _name(self, first: FirstFailure, now: float) -> list[Effect]:
        """The incident at once: who is on call must not wait for the others' saving."""
        self._first = first
        if any(end.hung for end in first.culprits):
            self._stood_code = m.EXIT_BAD_DATA if first.culprits[0].desync else m.EXIT_MACHINE
        changed, is_new = self._casebook.failed(first, self._ranks, now)
        told: list[Effect] = [WriteIncident(incident=changed, contract_of_rank=None)]
        if any(end.hung for end in first.culprits):
            told.append(WriteStacks(incident_id=changed["id"], text=self._stacks or self._failures.stacks))
        if not is_new:
            return told
        rank = changed["origin"]["rank"]
        return [self._event(now, "incident", rank=rank, step=changed["step"], text=changed["summary"], incident=changed["id"]), *told]

    def _exit_code(self) -> int | None:
        """None: the command's own code stands. A stop of ours that was completed names its code; so does a bad batch that made the command fail."""
        if self._last_closed is not None and self._last_closed.exit_code is not None:
            return self._last_closed.exit_code
        if self._left_code is not None:
            return self._left_code  # the order was given up, but not before ranks had left on it: their keepers say 0
        failed = any(goodbye is not None and goodbye.exit_code != 0 for goodbye in self._nodes.values())
        if failed and self._stood_code is not None and self.policy != "observe":
            return self._stood_code
        if failed and self._casebook.prevented_bad_batch():
            return m.EXIT_BAD_DATA
        return self._health.exit_code if failed and self.policy != "observe" else None

    def _final_exit_code(self) -> int | None:
        """Ours, or else the wrapped commands' own once all have ended: the highest, as `srun` has it."""
        own = [goodbye.exit_code for goodbye in self._nodes.values() if goodbye is not None]
        decided = self._exit_code()
        return max(own) if decided is None and self.state == "ended" else decided

    def _event(self, now: float, kind: str, *, text: str, **more: Any) -> AppendEvent:
        return self._log.line(now, kind, attempt=self._attempt, text=text, **more)
