"""The ranks of one start of the launcher: what they say, the order under way, which of them failed first, and what to do about it.

Owns one attempt, and nothing of the one before it leaks in: a restart makes a new one. Its orders: `orders.py`. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch_watchdog.job.ending import Ending
from torch_watchdog.job.event_log import words_of
from torch_watchdog.job.events import AppendEvent, Effect, OrderRequested, RankSpoke, Refused, SendOrder, WriteIncident, WriteStacks
from torch_watchdog.job.failures import FailureWatch
from torch_watchdog.job.first_failure import FirstFailure
from torch_watchdog.job.hangs import HangWatch, Hung
from torch_watchdog.job.losses import LossWatch
from torch_watchdog.job.orders import Orders, Shared
from torch_watchdog.job.pace import PaceWatch
from torch_watchdog.job.ranks import RankState, awaited, with_the_stopped_ones
from torch_watchdog.job.rescues import Rescues, why_not_asked
from torch_watchdog.job.standstill import AWAY
from torch_watchdog.rules.death import signal_name
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import RankStatus, TellRank
from torch_watchdog_proto.rescue_words import Failed, Free, Look, Looked
from torch_watchdog_proto.stop import events as stop
from torch_watchdog_proto.stop.rescue import RankFailed

__all__ = ["Attempt"]

_MAX_REASON = 4_000  # characters: what a rank has said of itself, in an order to the others


class Attempt:
    """One start of the launcher, numbered from 0."""

    def __init__(self, number: int, shared: Shared, *, world_size: int = 0) -> None:
        self.number, self.world_size = number, world_size
        self.ranks: dict[int, RankState] = {}
        self.ending = Ending()
        self._shared = shared
        self._orders = Orders(number, shared, ranks=self.ranks, ending=self.ending, send=self._send, again=self._nodes_away)
        self._losses, self._hangs = LossWatch(shared.rules), HangWatch(shared.rules)
        self._failures, self._pace = FailureWatch(), PaceWatch()
        self._rescues = Rescues(checkpoints_dir=shared.checkpoints_dir, grace_s=shared.grace_s, allowed=shared.policy != "observe")
        self._first: FirstFailure | None = None  # named; its rescue is still under way
        self._preempted, self._stacks = False, ""

    def deadline(self) -> float | None:
        """When a `tick` is due at the latest."""
        watches = (self._orders, self._losses, self._failures, self._rescues, self._hangs)
        return min((watch.deadline for watch in watches if watch.deadline is not None), default=None)

    @property
    def order_open(self) -> bool:
        return self._orders.is_open

    # What nodes and ranks say

    def record(self, node: str, block: m.StepBlock, now: float) -> None:
        """Steps of one rank."""
        if self._is_stranger(block.rank):
            return
        self._rank(block.rank, node, block.pid).record(block, now)
        self._losses.see(block, now)
        # What ranks write out while they are freed is no progress, nor a batch that one ended in, which has no time.
        if (block.step or any(block.micro_time_ns)) and not self._rescues.has_begun:
            self._hangs.progressed(now, [step_ns / 1e9 for step_ns in block.step_ns], batch_of=None if block.step else block.rank)
        self._pace.see(block)

    def rank_event(self, node: str, event: m.RankEvent, now: float) -> Iterable[Effect]:
        """What a node process has seen of a rank, or read in its log."""
        if self._is_stranger(event.rank):
            return
        rank = self._rank(event.rank, node, event.pid)
        yield self._event(
            now, f"rank.{event.kind}", rank=event.rank, text=words_of(event), level=event.level, exit_code=event.exit_code,
            signal=event.signal,
        )  # fmt: skip
        rank.seen(event)
        self._failures.hear(event, now)
        self._hangs.hear(event, now)
        if event.kind == "exited" and event.pid == rank.pid:
            rank.gone()
            rank.exited = True
            if rank.ends_well and event.exit_code is None and event.signal is None:
                event = replace(event, exit_code=0)  # its status was gone before its node could read it
            yield from self._orders.tell(self._gone(event.rank), now)
            yield from self._on_end(rank, event, node, now)
        if event.kind in ("asked", "exited") and self._failures.is_asked_for(event.pid):
            yield from self._tell_each(self._rescues.let_go(rank.rank))

    def _on_end(self, rank: RankState, event: m.RankEvent, node: str, now: float) -> Iterable[Effect]:
        if self._rescues.exited(rank.rank, now, by=event.signal):
            yield from (WriteIncident(incident=changed, contract_of_rank=None) for changed in self._shared.casebook.killed_by_us())
        if not rank.left:
            on_device, late = rank.step_on_device(event.updates_on_device), self._hangs.why_late(rank.rank)
            self._failures.see(event, node, rank.last_step, now, on_device=on_device, late=late)
            if event.exit_code != 0 and not self._failures.is_victim(event.pid) and not self._failures.is_asked_for(event.pid):
                yield from self._rescue(rank.rank, words_of(event), now)
        yield from self._tell_each(self._rescues.out(rank.rank, now))

    def spoke(self, spoke: RankSpoke, now: float) -> Iterable[Effect]:
        """A rank's own word."""
        message = spoke.message
        if self._is_stranger(message.rank, message.world_size if isinstance(message, m.RankHello) else None):
            return ()
        effects: list[Effect] = []
        if isinstance(message, m.RankHello):
            effects += self._on_rank_hello(spoke.node, message, now)
        rank = self.ranks.get(message.rank)
        if rank is None or not self._orders.are_possible:
            return effects
        rank.hear(message, now)
        if isinstance(message, m.Left):
            rank.left = True
            self.ending.left(message.generation, earlier=self._shared.log.exit_code_of(self.number, message.generation))
        if isinstance(message, m.Committed):
            self.ending.sealed(message)
        interrupted = isinstance(message, m.Finished) and not self._failures.said_end(rank.pid, now)
        if isinstance(message, m.Signalled):
            effects += self._on_signalled(message, now)
        if isinstance(message, Looked):
            self._hangs.answered(message)
            self._failures.looked(message)
        if isinstance(message, Failed):
            effects += self._on_failed(rank, message, now)
        effects += self._tell_each(self._rescues.said(message, now))
        return [*effects, *self._orders.tell(self._gone(message.rank) if interrupted else stop.FromRank(message=message), now)]

    def _on_rank_hello(self, node: str, hello: m.RankHello, now: float) -> Iterable[Effect]:
        if not self._orders.are_possible:
            self.world_size = hello.world_size
            self._orders.begin(hello.world_size)
        known = self.ranks.get(hello.rank)
        rank = self._rank(hello.rank, node, hello.pid)
        if known is None or known.pid != hello.pid or known.local_rank is None:
            text = f"rank {hello.rank} of {hello.world_size} on {node}, pid {hello.pid}, torch {hello.torch_version}"
            yield self._event(now, "rank.connected", rank=hello.rank, text=text)
        rank.node, rank.pid = node, hello.pid
        self._rescues.rank_here(hello.rank)

    def _on_failed(self, rank: RankState, failed: Failed, now: float) -> Iterable[Effect]:
        self._failures.raised(failed, node=rank.node, pid=rank.pid, now=now)
        yield self._event(now, "rank.failed", rank=rank.rank, step=failed.step, text=" <- ".join((failed.text, *failed.chain[1:])))
        yield from self._orders.tell(stop.RankGone(rank=rank.rank), now)
        if self._failures.is_asked_for(rank.pid) and not self._rescues.has_begun:
            yield from self._tell_each([stop.Tell(rank=rank.rank, order=m.Leave(generation=0))])  # it waits for a word
            return
        if self._failures.has_waited(rank.pid) and not (self._rescues.has_begun or self._failures.has_asked):
            # For whom: they are asked before they are freed from where they are.
            alive = self._ranks_in_training() - {rank.rank}
            self._failures.asked(alive)
            yield from self._ask(alive)[1]
            self._say_who_is_away(alive)
        victim = self._failures.may_hold_all(rank.pid)
        reason = f"rank {rank.rank}{' lost another' if victim else ''}: {failed.text}"
        why_not = why_not_asked(failed)
        said = {"victim": victim, "waits": not why_not, "why_not": why_not, "updates_applied": failed.updates_applied}
        yield from self._rescue(rank.rank, reason, now, **said)

    def _on_signalled(self, message: m.Signalled, now: float) -> Iterable[Effect]:
        """Whoever takes the machine away signals every rank, or one node's, and perhaps twice: that is one order."""
        if self._preempted or self._shared.policy == "observe" or self._rescues.has_begun:  # the launcher ends what a failure has left
            return
        self._preempted = True
        name = signal_name(message.signal)
        text = f"rank {message.rank} got {name}: the job saves and stops"
        yield self._event(now, "rank.signalled", rank=message.rank, text=text, signal=message.signal)
        request = stop.StopRequested(kind="order.preemption", by=name, reason=f"{name} from outside", exit_code=128 + message.signal)
        yield from self._orders.want(request, now)

    def gone(self, rank: int, pid: int, now: float) -> Iterable[Effect]:
        """A rank's control connection has ended."""
        state = self.ranks.get(rank)
        if state is None or state.pid != pid or not state.alive:
            return ()
        state.gone()
        self._failures.gone(pid)
        gone = self._event(now, "rank.gone", rank=rank, text=f"rank {rank} closed its control socket", step=state.last_step)
        return (gone, *self._orders.tell(self._gone(rank), now), *self._tell_each(self._rescues.out(rank, now)))

    def _gone(self, rank: int) -> stop.RankGone:
        is_late = bool(self._hangs.why_late(rank))
        return stop.RankGone(rank=rank, why=f"rank {rank} {stop.IS_GONE}, and had not come to its next step by then" if is_late else "")

    def node_away(self, node: str, now: float) -> Iterable[Effect]:
        """Its ranks may train on, unreachable: a request that needs them is refused at once, not after a wait of all the others."""
        ranks = self._alive_on(node)
        for rank in ranks:
            self._hangs.state(rank, AWAY)
        if self._orders.is_open:
            return ()  # its deadline says how long it may stay away
        return [effect for rank in ranks for effect in self._orders.tell(stop.RankGone(rank=rank), now)]

    def _nodes_away(self, now: float) -> Iterable[Effect]:
        """An order had waited for them, and is over."""
        return [effect for node in sorted(self._shared.away) for effect in self.node_away(node, now)]

    def node_back(self, node: str, now: float) -> None:
        """It reports over a new line. What its ranks say of themselves follows."""
        self._hangs.node_back(self._alive_on(node), now)

    def node_left(self, node: str, goodbye: m.NodeGoodbye, now: float) -> Iterable[Effect]:
        """The command on this node has ended."""
        effects: list[Effect] = []
        for rank in self._alive_on(node):
            self.ranks[rank].gone()
            why = f"the command on {node} has ended, and nobody speaks to rank {rank} any more"
            effects += self._orders.tell(stop.RankGone(rank=rank, why=why), now)
        self._failures.command_ended(goodbye.exit_code, goodbye.signal)
        return effects

    def gives_way_to(self, world_size: int) -> bool:
        """Whether that many ranks may take the place of these: of another world, and none of this one is there any more."""
        there = (rank for rank in self.ranks.values() if rank.alive and rank.node not in self._shared.away)
        return self._orders.are_possible and world_size != self.world_size and not any(there)

    def _is_stranger(self, rank: int, world_size: int | None = None) -> bool:
        """A rank that this start of the launcher does not have: nothing that it says or suffers is of this job."""
        return self._orders.are_possible and (rank >= self.world_size or world_size not in (None, self.world_size))

    def _alive_on(self, node: str) -> list[int]:
        return [rank.rank for rank in self.ranks.values() if rank.node == node and rank.alive]

    def _rank(self, rank: int, node: str, pid: int) -> RankState:
        if rank not in self.ranks:
            self.ranks[rank] = RankState(rank=rank, node=node, pid=pid)
        return self.ranks[rank]

    # Standing still

    def _watch_standstill(self, now: float) -> Iterable[Effect]:
        """Asks the ranks where they are once no step has come for unusually long, and frees them from one that will not come. While an order waits for
        their next step that is only told, until its deadline."""
        alive, orders = self._ranks_in_training(), self._orders
        if (
            not orders.are_possible
            or (orders.is_open and not orders.awaits_step)
            or self._first is not None
            or self._rescues.has_begun
            or len(alive) < 2
        ):
            return ()
        if self._hangs.should_ask(now):
            generation, questions = self._ask(alive)
            self._hangs.asked(alive, generation, now)
            self._say_who_is_away(alive)
            return questions
        hung = self._hangs.verdict(now)
        if hung is None or (hung.sure and orders.is_open):
            return ()
        return self._on_hung(hung, now)

    def _on_hung(self, hung: Hung, now: float) -> Iterable[Effect]:
        ranks = [self.ranks[rank] for rank in hung.ranks]
        yield self._event(now, "rank.late", rank=ranks[0].rank, step=ranks[0].last_step, text=hung.words)
        self._stacks = hung.stacks
        if not hung.sure:
            return
        for rank in ranks:
            step = None if rank.last_step is None else rank.last_step + 1
            self._failures.hung(rank.rank, node=rank.node, pid=rank.pid, step=step, why=hung.why, now=now, desync=hung.desync)
        # Of several that are only in different collectives each holds a whole state: one is ended, another saves.
        yield from self._rescue(ranks[0].rank, f"rank {ranks[0].rank}: {hung.why}", now)

    def ask_node(self, rank: int) -> Iterable[Effect]:
        """What the rank and the workers of its loaders do; the rank itself is left alone."""
        return self._tell_each((stop.Tell(rank=rank, order=Look(generation=0)),))

    @property
    def standstill(self) -> str:
        """Who is late and since when, and what is done about it, in words; empty while steps come."""
        return self._hangs.told(observed=self._shared.policy == "observe", ending=self._rescues.has_begun)

    def statuses(self) -> tuple[RankStatus, ...]:
        late = self._hangs.late if self.standstill and not self._rescues.has_begun else ()  # nobody waits for a rank that saves
        return tuple(self.ranks[rank].status(late=rank in late) for rank in sorted(self.ranks))

    def _ranks_in_training(self) -> frozenset[int]:
        return frozenset(rank.rank for rank in self.ranks.values() if rank.alive and rank.phase != "end")

    def _ask(self, ranks: frozenset[int]) -> tuple[int, list[Effect]]:
        """Where they are: the question's number, and the questions."""
        generation = self._orders.next_generation()
        return generation, self._tell_each(stop.Tell(rank=rank, order=Look(generation=generation)) for rank in sorted(ranks))

    def _say_who_is_away(self, ranks: frozenset[int]) -> None:
        for rank in ranks:
            if self.ranks[rank].node in self._shared.away:
                self._hangs.state(rank, AWAY)
                self._failures.state(rank, AWAY)

    # Orders

    def requested(self, event: OrderRequested, now: float) -> Iterable[Effect]:
        """By a person or a program, from outside."""
        if not self._orders.are_possible:
            return (Refused(reason="no rank has reported yet: try again once the training has begun"),)
        if self.ending.is_stopping:
            return (Refused(reason=f"it has stopped already, and is about to end: {self.ending.why}"),)
        if event.kind == "order.cancel":
            return self._and_who_is_awaited(self._orders.tell(stop.CancelRequested(by=event.by), now))
        reason = event.reason or f"requested by {event.by}"
        leave = event.kind != "order.checkpoint"
        request = stop.StopRequested(kind=event.kind, by=event.by, reason=reason, exit_code=0, save=True, leave=leave)
        return self._and_who_is_awaited(self._orders.tell(request, now))

    def _and_who_is_awaited(self, effects: Iterable[Effect]) -> Iterable[Effect]:
        """A refusal because an order waits for the ranks says for whom."""
        if not self._orders.awaits_step:
            return effects
        why = awaited(self.statuses(), self.standstill, self._shared.policy)
        return [replace(effect, reason=f"{effect.reason}; {why}") if isinstance(effect, Refused) else effect for effect in effects]

    def tick(self, now: float) -> Iterable[Effect]:
        """Time has passed."""
        effects = [*self._orders.tell(stop.Tick(), now), *self._tell_each(self._rescues.tick(now)), *self._watch_standstill(now)]
        return [*effects, *self._orders.tick(now)]

    # The rescue of the others, once a rank has failed

    def _rescue(self, rank: int, reason: str, now: float, **said: Any) -> Iterable[Effect]:
        """`said`: what else is known of it, as RankFailed has it."""
        if not self._orders.are_possible:
            return ()
        number = self._orders.next_generation()
        failed = RankFailed(rank=rank, reason=reason[:_MAX_REASON], generation=number, **said)
        return self._tell_each(self._rescues.failed(failed, now))

    def _tell_each(self, told: Iterable[stop.Tell]) -> list[Effect]:
        return [effect for tell in told for effect in self._send(tell)]

    def _send(self, tell: stop.Tell) -> Iterable[Effect]:
        self.ending.told(tell.order)
        rank = self.ranks.get(tell.rank)
        if rank is not None:
            rank.told(tell.order)
            if isinstance(tell.order, Free):
                self._failures.told_of_another(rank.pid)
            yield SendOrder(node=rank.node, tell=TellRank(attempt=self.number, rank=tell.rank, order=tell.order))

    # Judging

    def judge(self, now: float, *, at_end: bool) -> Iterable[Effect]:
        """Losses that are no numbers, and who failed first. `at_end`: nothing more will be heard."""
        return (*self._judge_losses(now, at_end), *self._judge_failures(now, at_end))

    def _judge_losses(self, now: float, at_end: bool) -> Iterable[Effect]:
        if self._losses.deadline is None:
            return ()
        diverged = self._losses.verdict({number: rank.seen_step for number, rank in self.ranks.items()}, now=now, at_end=at_end)
        if diverged is None:
            return ()
        found = self._shared.casebook.diverged(diverged, self.ranks, now)
        effects: list[Effect] = [
            self._event(now, "incident", rank=diverged.origin, step=found["step"], text=found["summary"], incident=found["id"]),
            WriteIncident(incident=found, contract_of_rank=None),
        ]
        if self._shared.policy != "observe" and not at_end:
            # Parameters may be NaN by now: nothing that is saved here would be good, so nothing is.
            request = stop.StopRequested(
                kind=found["kind"], by=f"rule {found['kind']}", reason=found["summary"], exit_code=m.EXIT_DIVERGED, save=False, leave=True
            )
            effects += self._orders.want(request, now)
        return effects

    def _judge_failures(self, now: float, at_end: bool) -> Iterable[Effect]:
        rescue = self._rescues.ended
        known = at_end or all(rank.exited for rank in self.ranks.values()) or (rescue is not None and self._failures.is_told)
        first = self._failures.verdict(now=now, all_ended=known, skipped=self._pace.skipped())
        effects: list[Effect] = [] if first is None else self._name(first, now)
        if self._first is not None and (rescue is not None or at_end):
            rescue = rescue and with_the_stopped_ones(rescue, self.ranks.values())
            told = () if rescue is None else self._shared.casebook.rescued(rescue, exit_code=self.ending.stood_code)
            effects += [WriteIncident(incident=changed, contract_of_rank=None) for changed in told]
            for rank in (rank for rank in self.ranks.values() if rank.node in self._shared.away):
                self._rescues.exited(rank.rank, now)  # its end will not be seen: nobody waits for it
            effects += self._tell_each(self._rescues.judged(self._first, now=now))
            self._first = None
        return effects

    def _name(self, first: FirstFailure, now: float) -> list[Effect]:
        """The incident at once: who is on call must not wait for the others' saving."""
        self._first, stood_still = first, any(end.hung for end in first.culprits)
        if stood_still:
            self.ending.stood_still(desync=bool(first.culprits[0].desync))
        changed, is_new = self._shared.casebook.failed(first, self.ranks, now)
        told: list[Effect] = [WriteIncident(incident=changed, contract_of_rank=None)]
        if stood_still or first.culprits[0].late:
            told.append(WriteStacks(incident_id=changed["id"], text=self._stacks or self._failures.stacks))
        if not is_new:
            return told
        rank = changed["origin"]["rank"]
        return [self._event(now, "incident", rank=rank, step=changed["step"], text=changed["summary"], incident=changed["id"]), *told]

    def _event(self, now: float, kind: str, *, text: str, **more: Any) -> AppendEvent:
        return self._shared.log.line(now, kind, attempt=self.number, text=text, **more)
