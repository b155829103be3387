"""A simulated job: both halves of the stop protocol, ranks coupled by a collective each step, and a network and parts that fail as the plan says.

Discrete events: time jumps from one to the next. Every choice comes from one seeded generator, so that a failing seed replays exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

from plan import Fault, Plan

from torch_watchdog_proto.messages import (
    BatchFact,
    CannotPromise,
    Commit,
    Committed,
    Finished,
    Hold,
    Leave,
    Left,
    Order,
    Phase,
    Prepare,
    RankHello,
    RankMessage,
    Saved,
    Saving,
    Vetoed,
    Violation,
    WriteCommitted,
)
from torch_watchdog_proto.stop.coordinator import Coordinator
from torch_watchdog_proto.stop.events import CancelRequested, Closed, Event, FromRank, Opened, RankGone, Refusal, StopRequested, Tell, Tick
from torch_watchdog_proto.stop.participant import Act, GivenUp, Participant, Pass, Propose, Skip, Wait

HOLD_TIMEOUT = 10.0
GRACE = 60.0
MUTE_FOR = 15.0
VIOLATION = Violation(kind="batch.index_out_of_range", summary="bad", cause="c", fix="f", batch=BatchFact(key="x"))
_COLLECTIVE = object()


@dataclass(slots=True, eq=False)
class SimRank:
    """One rank of one attempt: its half of the protocol, and what became of it."""

    number: int
    attempt: int
    half: Participant
    applied: list[int] = field(default_factory=list)
    vetoed: list[int] = field(default_factory=list)
    entered: int = -1  # the last step whose collective it has entered
    released: list[int] = field(default_factory=list)  # steps that it goes through with a stand-in
    end: str | None = None  # left, finished, raised, broken, killed
    ended_at: float = 0.0
    evaluating: bool = False
    saved_with: tuple[int, ...] = ()  # the updates that it left with
    committed_checkpoint: bool | None = None
    line: bool = True  # to its node process
    muted_until: float = 0.0
    hooks_off: bool = False
    held: tuple[RankMessage, ...] = ()  # what its node process says again to a daemon that connects
    words: int = 0
    prepares: int = 0  # that it heard
    excess_wait: float = 0.0  # beyond what the timeouts of the orders allow
    waited: float = 0.0
    life: Iterator[Any] | None = None
    parked: Any = None
    wake: int = 0  # number of the wake-up that counts


@dataclass(slots=True)
class Attempt:
    """What the outside world holds of one attempt: the store, and the disk."""

    number: int
    ranks: list[SimRank]
    register: dict[int, Commit | None] = field(default_factory=dict)
    parts: dict[int, dict[int, int]] = field(default_factory=dict)  # generation -> rank -> updates, written without error
    sealed: dict[int, bool] = field(default_factory=dict)  # generation -> good; by the rank that seals
    half_sealed: list[int] = field(default_factory=list)  # generations that were sealed without all parts


class World:
    """Runs one plan to its end under one seed. `coordinator`, `participant`: the halves, or broken ones."""

    def __init__(
        self, plan: Plan, seed: int, *, coordinator: type[Coordinator] = Coordinator, participant: type[Participant] = Participant
    ) -> None:
        self.plan, self.random, self.now = plan, Random(seed), 0.0
        self._coordinator, self._participant = coordinator, participant
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._lines: dict[tuple[str, int], float] = {}
        self._broken_lines: dict[int, int] = {}  # rank -> how often its line to the daemon was cut: what was sent before is lost
        self.attempts: list[Attempt] = []
        self.opened: list[Opened] = []
        self.closed: list[Closed] = []
        self.commits: list[Commit] = []
        self.refused: list[Refusal] = []
        self.heard: list[tuple[int, Event]] = []  # by the daemon: (attempt, event)
        self.daemon: Coordinator | None = None
        self.daemon_attempt = 0
        self.daemon_up = True
        self.store_up = True
        self.daemon_words = 0
        self.last_generation = 0
        self.said_to: list[tuple[SimRank, Order]] = []
        self._word_limit = min((fault.at for fault in plan.of("daemon_dies")), default=inf)
        self._kills = {fault.rank: fault.at for fault in plan.of("kill_at_word")}
        self._bad = {(fault.rank, int(fault.at)) for fault in plan.of("bad")}

    # Time

    def after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, call, arguments))

    def run(self) -> World:
        self._start_attempt()
        for fault in self.plan.faults:
            happens = getattr(self, f"_on_{fault.kind}", None)
            if happens is not None:
                self.after(fault.at, happens, fault)
        heap = self._heap
        for _ in range(100_000):
            if not heap:
                return self
            self.now, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
        raise AssertionError(f"P6: the job does not end: {[rank.end for rank in self.attempts[-1].ranks]}")

    # The network: a line keeps its order (unless the plan reorders), lines are independent, a message may come twice.

    def _send(self, line: tuple[str, int], call: Callable[..., None], *arguments: Any) -> None:
        plan, random = self.plan, self.random
        cut = self._broken_lines.get(line[1], 0)
        for _ in range(2 if random.random() < plan.repeat else 1):
            if plan.loss and random.random() < plan.loss:
                continue
            at = self.now + random.choice(plan.delays)
            if not plan.reorder or random.random() >= plan.reorder:
                at = max(at, self._lines.get(line, 0.0))
                self._lines[line] = at
            self.after(at - self.now, call, line[1], cut, *arguments)

    def tell(self, rank: SimRank, message: RankMessage) -> bool:
        """A rank says something; False where nobody can hear it."""
        rank.words += 1
        if rank.words >= self._kills.get(rank.number, inf) and rank.attempt == 0:
            self._die(rank, "killed")
        if rank.end == "killed" or not rank.line:
            return False
        if isinstance(message, Hold):
            rank.held = (message,)
        elif isinstance(message, Vetoed | Left | Finished):
            rank.held = ()
        self._send(("up", rank.number), self._arrive_up, rank.attempt, FromRank(message=message))
        return True

    def _arrive_up(self, line: int, cut: int, attempt: int, event: Event) -> None:
        if self._broken_lines.get(line, 0) == cut:
            self._to_daemon(attempt, event)

    def _arrive_down(self, line: int, cut: int, rank: SimRank, order: Order) -> None:
        if self._broken_lines.get(line, 0) != cut or rank.end is not None or not rank.line:
            return
        if self.now < rank.muted_until:
            self.after(rank.muted_until - self.now, self._arrive_down, line, cut, rank, order)
            return
        if rank.hooks_off and isinstance(order, Prepare):
            self.tell(rank, CannotPromise(rank=rank.number, generation=order.generation, reason="its hook is off"))
            return
        self.said_to.append((rank, order))
        if not isinstance(order, Prepare):
            rank.held = ()  # by its node process, which passes the answer on
        rank.prepares += 1
        phase: Phase = "eval" if rank.evaluating else "train"
        answers = rank.half.handle(order, phase=phase, now=self.now)
        while any(isinstance(answer, Propose) for answer in answers):
            for answer in answers:
                self._decide(rank, answer)  # type: ignore[arg-type]  # a proposal comes alone
            answers = rank.half.handle(order, phase=phase, now=self.now)
        for answer in answers:
            self.tell(rank, answer)  # type: ignore[arg-type]
        if isinstance(rank.parked, Wait):
            self._resume(rank, rank.wake)

    # The daemon

    def _to_daemon(self, attempt: int, event: Event) -> bool:
        """As the job does it: the newest attempt counts. True where a request was refused."""
        if not self.daemon_up:
            return True
        if attempt > self.daemon_attempt or self.daemon is None:
            if not (isinstance(event, FromRank) and isinstance(event.message, RankHello)):
                return True
            self.daemon_attempt, self.last_generation = attempt, self.last_generation if attempt == self.daemon_attempt else 0
            self.daemon = self._coordinator(
                world_size=self.plan.world, policy=self.plan.policy, checkpoints_dir="c", grace_s=GRACE, generation=self.last_generation
            )
        if attempt != self.daemon_attempt:
            return True
        self.heard.append((attempt, event))
        return self._carry_out(self.daemon, event)

    def _carry_out(self, daemon: Coordinator, event: Event) -> bool:
        refused = False
        before = daemon.next_deadline()
        for effect in daemon.handle(event, now=self.now):
            if isinstance(effect, Tell):
                self.daemon_words += 1
                if self.daemon_words >= self._word_limit:
                    self._word_limit, self.daemon_up, self.daemon = inf, False, None
                    return True
                rank = self.attempts[self.daemon_attempt].ranks[effect.rank]
                if isinstance(effect.order, Commit) and effect.order not in self.commits:
                    self.commits.append(effect.order)
                self._send(("down", effect.rank), self._arrive_down, rank, effect.order)
            elif isinstance(effect, Closed):
                self.closed.append(effect)
            elif isinstance(effect, Opened):
                self.opened.append(effect)
                self.last_generation = effect.generation
            elif isinstance(effect, Refusal):
                self.refused.append(effect)
                refused = True
        deadline = daemon.next_deadline()
        if deadline is not None and deadline != before:
            self.after(deadline - self.now, self._tick, daemon)
        return refused

    def _tick(self, daemon: Coordinator) -> None:
        if daemon is self.daemon:
            self._carry_out(daemon, Tick())

    # What the plan does

    def _on_stop(self, fault: Fault) -> None:
        self._ask(StopRequested(kind="order.stop", by="op", reason="asked", leave=True), fault, 10)

    def _on_checkpoint(self, fault: Fault) -> None:
        self._ask(StopRequested(kind="order.checkpoint", by="op", reason="asked", leave=False), fault, 10)

    def _on_leave(self, fault: Fault) -> None:
        self._ask(StopRequested(kind="order.stop", by="op", reason="asked", save=False, leave=True), fault, 10)

    def _ask(self, request: StopRequested, fault: Fault, tries: int) -> None:
        """An operator whose request is refused asks again, for a while."""
        if self.daemon is not None and not self._carry_out(self.daemon, request):
            return
        if tries and any(rank.end is None for rank in self.attempts[-1].ranks):
            self.after(0.5, self._ask, request, fault, tries - 1)

    def _on_cancel(self, _: Fault) -> None:
        if self.daemon is not None:
            self._carry_out(self.daemon, CancelRequested(by="op"))

    def _on_kill(self, fault: Fault) -> None:
        self._die(self.attempts[-1].ranks[fault.rank], "killed")

    def _on_mute(self, fault: Fault) -> None:
        self.attempts[-1].ranks[fault.rank].muted_until = self.now + MUTE_FOR

    def _on_hooks_off(self, fault: Fault) -> None:
        self.attempts[-1].ranks[fault.rank].hooks_off = True

    def _on_node_dies(self, fault: Fault) -> None:
        rank = self.attempts[-1].ranks[fault.rank]
        rank.line = False
        self._send(("up", rank.number), self._arrive_up, rank.attempt, RankGone(rank=rank.number))
        if isinstance(rank.parked, Wait):
            self._resume(rank, rank.wake)

    def _on_store_dies(self, _: Fault) -> None:
        self.store_up = False

    def _on_cut(self, fault: Fault) -> None:
        self._broken_lines[fault.rank] = self._broken_lines.get(fault.rank, 0) + 1
        self.after(self.random.choice((0.1, 1.0, 6.0)), self._hello_again, self.attempts[-1].ranks[fault.rank])

    def _on_daemon_back(self, _: Fault) -> None:
        if self.daemon is None:
            self.daemon_up, self.daemon = True, None
            for rank in self.attempts[-1].ranks:
                self._hello_again(rank)

    def _hello_again(self, rank: SimRank) -> None:
        """By its node process, which knows what it said first."""
        if rank.line and rank.end is None:
            for message in (self._hello(rank), *rank.held):
                self._send(("up", rank.number), self._arrive_up, rank.attempt, FromRank(message=message))
        elif rank.line and rank.end != "left":
            self._send(("up", rank.number), self._arrive_up, rank.attempt, RankGone(rank=rank.number))

    def _on_restart(self, _: Fault) -> None:
        ranks = self.attempts[-1].ranks
        if len(self.attempts) == 1 and any(rank.end in ("killed", "raised", "broken", None) for rank in ranks):
            for rank in ranks:
                if rank.end is None:
                    self._die(rank, "killed")
            self._start_attempt()

    def _start_attempt(self) -> None:
        number = len(self.attempts)
        ranks = [SimRank(rank, number, self._participant(rank)) for rank in range(self.plan.world)]
        self.attempts.append(Attempt(number, ranks))
        for rank in ranks:
            self._to_daemon(number, FromRank(message=self._hello(rank)))  # long before the first step
            rank.life = self._live(rank)
            self.after(self.random.random(), self._resume, rank, 0)

    def _hello(self, rank: SimRank) -> RankHello:
        return RankHello(rank=rank.number, local_rank=0, world_size=self.plan.world, pid=1, attempt=rank.attempt, host="h", version="0")

    # A rank's training thread: a generator that yields how long it computes, or what it waits for.

    def _resume(self, rank: SimRank, wake: int) -> None:
        if wake != rank.wake or rank.end is not None or rank.life is None:
            return
        rank.wake += 1
        parked = rank.parked = next(rank.life, None)
        if isinstance(parked, float):
            self.after(parked, self._resume, rank, rank.wake)
        elif isinstance(parked, Wait) and parked.until < inf:
            self.after(max(0.0, parked.until - self.now), self._resume, rank, rank.wake)

    def _end(self, rank: SimRank, how: str) -> None:
        rank.end, rank.ended_at = how, self.now
        self._free_peers(rank.attempt)

    def _die(self, rank: SimRank, how: str) -> None:
        if rank.end is None:
            self._end(rank, how)
            if rank.line:
                self._send(("up", rank.number), self._arrive_up, rank.attempt, RankGone(rank=rank.number))

    def _free_peers(self, attempt: int) -> None:
        """Those who wait in a collective see that it is complete, or that a peer is gone."""
        for other in self.attempts[attempt].ranks:
            if other.parked is _COLLECTIVE and other.end is None:
                self.after(0.0, self._resume, other, other.wake)

    def _live(self, rank: SimRank) -> Iterator[Any]:
        plan, random = self.plan, self.random
        for step in range(plan.steps):
            yield from self._boundary(rank)
            if rank.end:
                return
            if self._is_in_hand(rank, step):
                yield from self._held(rank, step)
                if rank.end:
                    return
            rank.entered = step
            self._free_peers(rank.attempt)
            if plan.coupled:
                yield from self._collective(rank, step)
                if rank.end:
                    return
            yield random.random()
            yield from self._gate(rank, step)
            if rank.end:
                return
            if step == plan.evaluation_after:
                yield from self._evaluate(rank)
                if rank.end:
                    return
        yield from self._boundary(rank)
        if not rank.end:
            self.tell(rank, Finished(rank=rank.number, passed=rank.half.passed))
            if not rank.end:
                self._end(rank, "finished")

    def _is_in_hand(self, rank: SimRank, step: int) -> bool:
        """A loop that is ahead, and of which that is not known, has a bad batch in the step before, too."""
        return (rank.number, step) in self._bad or (self.plan.ahead and (rank.number, step + 1) in self._bad)

    def _evaluate(self, rank: SimRank) -> Iterator[Any]:
        rank.evaluating = True
        for _ in range(4):
            yield from self._boundary(rank)
            if rank.end:
                return
            yield self.random.random()
        yield from self._boundary(rank)
        rank.evaluating = False

    def _collective(self, rank: SimRank, step: int) -> Iterator[Any]:
        others = self.attempts[rank.attempt].ranks
        while any(other.entered < step for other in others):
            if any(other.end and other.entered < step for other in others):
                self._die(rank, "broken")  # a peer is gone
                return
            yield _COLLECTIVE

    def _ask_half(self, rank: SimRank, ask: Callable[[float], Any]) -> Iterator[Any]:
        """The gate of the agent, in the simulated time."""
        began, heard = self.now, rank.prepares
        while True:
            decision = ask(self.now if rank.line else inf)
            if isinstance(decision, Propose):
                self._decide(rank, decision)
            elif isinstance(decision, Wait):
                yield decision
            else:
                waited = self.now - began
                rank.waited += waited
                rank.excess_wait = max(rank.excess_wait, waited - 2 * HOLD_TIMEOUT * (1 + rank.prepares - heard))
                return decision

    def _decide(self, rank: SimRank, propose: Propose) -> None:
        register = self.attempts[rank.attempt].register
        stands = register.setdefault(propose.generation, propose.commit) if self.store_up else None
        rank.half.decided(propose.generation, stands, is_known=self.store_up)

    def _boundary(self, rank: SimRank) -> Iterator[Any]:
        act = yield from self._ask_half(rank, lambda now: rank.half.at_boundary(now=now))
        if act is not None:
            yield from self._act(rank, act.commit)

    def _held(self, rank: SimRank, step: int) -> Iterator[Any]:
        if not rank.line:
            return  # nobody could be told: the batch takes its course
        deadline = self.now + HOLD_TIMEOUT
        heard = self.tell(rank, Hold(rank=rank.number, step=step, micro_step=0, violation=VIOLATION, timeout_s=HOLD_TIMEOUT))
        if rank.end:
            return
        decision = (
            yield from self._ask_half(rank, lambda now: rank.half.at_hold(step, deadline=deadline, now=now)) if heard else _given_up()
        )
        if isinstance(decision, GivenUp):
            self._die(rank, "raised")
        else:
            rank.released.append(step)

    def _gate(self, rank: SimRank, step: int) -> Iterator[Any]:
        decision = yield from self._ask_half(rank, lambda now: rank.half.at_gate(step, now=now))
        if isinstance(decision, Act):
            yield from self._act(rank, decision.commit)
            if rank.end:
                return
            decision = rank.half.at_gate(step, now=self.now)
        if isinstance(decision, Skip):
            rank.vetoed.append(step)
            self.tell(rank, Vetoed(rank=rank.number, generation=decision.generation, step=step))
        elif isinstance(decision, Pass):
            rank.applied.append(step)

    def _act(self, rank: SimRank, commit: Commit) -> Iterator[Any]:
        attempt, generation, updates = self.attempts[rank.attempt], commit.generation, len(rank.applied)
        if commit.save:
            yield from self._save(rank, attempt, commit, updates)
            if rank.end:
                return
        rank.half.done(generation)
        if commit.leave:
            rank.saved_with = tuple(rank.applied)
            self.tell(rank, Left(rank=rank.number, generation=generation, updates_applied=updates))
            if not rank.end:
                self._end(rank, "left")

    def _save(self, rank: SimRank, attempt: Attempt, commit: Commit, updates: int) -> Iterator[Any]:
        generation, number = commit.generation, rank.number
        self.tell(rank, Saving(rank=number, generation=generation, updates_applied=updates))
        yield self.random.random()
        error = "disk full" if any(fault.rank == number for fault in self.plan.of("broken_save")) else None
        finite = all(fault.rank != number for fault in self.plan.of("not_finite"))
        if error is None:
            attempt.parts.setdefault(generation, {})[number] = updates
        self.tell(rank, Saved(rank=number, generation=generation, updates_applied=updates, path=commit.path, error=error, finite=finite))
        deadline, sealed = self.now + GRACE, False
        while True:
            answer = rank.half.answer(generation)
            if isinstance(answer, WriteCommitted) and not sealed:
                sealed = True
                self._seal(attempt, generation, good=answer.good)
                self.tell(rank, Committed(rank=number, generation=generation))
            elif isinstance(answer, Leave):
                break
            elif (self.now if rank.line else inf) >= deadline:
                answer = Leave(generation=generation)
                break
            yield Wait(deadline)
            if rank.end:
                return
        rank.committed_checkpoint = answer.committed
        if not answer.committed and not sealed and number == 0:
            attempt.parts.pop(generation, None)  # discarded

    def _seal(self, attempt: Attempt, generation: int, *, good: bool) -> None:
        parts = attempt.parts.get(generation, {})
        if len(parts) < self.plan.world or len(set(parts.values())) > 1:
            attempt.half_sealed.append(generation)
        attempt.sealed[generation] = good


def _given_up() -> Iterator[Any]:
    """Nobody hears the hold."""
    yield from ()
    return GivenUp("the node process cannot be reached")
