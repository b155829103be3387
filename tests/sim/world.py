"""A simulated job: both halves of the stop protocol, ranks coupled by a collective each step, and a network with delay, repeats and deaths.

Time moves only when nothing else can. Every choice comes from one seeded generator, so a failing seed replays exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch_watchdog_proto.messages import (
    BatchFact,
    Commit,
    Committed,
    Finished,
    Hold,
    Leave,
    Left,
    Order,
    RankHello,
    RankMessage,
    Saved,
    Saving,
    Vetoed,
    Violation,
    WriteCommitted,
)
from torch_watchdog_proto.stop.coordinator import Coordinator
from torch_watchdog_proto.stop.events import Closed, Event, FromRank, RankGone, Refusal, StopRequested, Tell, Tick
from torch_watchdog_proto.stop.participant import Act, GivenUp, Participant, Pass, Propose, Released, Skip, Wait

HOLD_TIMEOUT = 10.0
VIOLATION = Violation(kind="batch.index_out_of_range", summary="bad", cause="c", fix="f", batch=BatchFact(key="x"))


@dataclass
class SimRank:
    """One rank: its half of the protocol, and what became of it."""

    number: int
    half: Participant
    applied: list[int] = field(default_factory=list)
    vetoed: list[int] = field(default_factory=list)
    entered: int = -1  # the last step whose collective it has entered
    end: str | None = None  # left, finished, raised, killed
    committed_checkpoint: bool | None = None
    waited: float = 0.0
    longest_wait: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What happens to the job. `bad`: (rank, step) with a bad batch; `stops`: steps after whose start an operator asks; `kills`: (rank, step)."""

    world: int
    steps: int
    bad: frozenset[tuple[int, int]] = frozenset()
    stops: tuple[tuple[int, bool], ...] = ()  # (when, leave)
    kills: frozenset[tuple[int, int]] = frozenset()
    broken_saves: frozenset[int] = frozenset()
    policy: str = "stop"
    repeats: float = 0.1
    daemon_dies_after: int | None = None  # events: from then on it hears nothing, and any part of what it had sent may be lost


class World:
    """Runs one plan to its end under one seed."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.random, self.now = plan, random.Random(seed), 0.0
        self.coordinator = Coordinator(world_size=plan.world, policy=plan.policy, checkpoints_dir="c", grace_s=60.0)  # type: ignore[arg-type]
        self.ranks = [SimRank(number, Participant(number)) for number in range(plan.world)]
        self.up: list[tuple[float, int, Event]] = []
        self.down: list[tuple[float, int, int, Order]] = []
        self.commits: list[Commit] = []
        self.closed: list[Closed] = []
        self.saved: dict[int, set[int]] = {}
        self._counter = 0
        self._last_arrival: dict[tuple[str, int], float] = {}
        self._stops = list(plan.stops)
        self.sealed: set[int] = set()
        self.register: dict[int, Commit | None] = {}  # the decision register: written once
        self.events, self.daemon_dead = 0, False

    # The network: each line keeps its order, lines are independent, a message may come twice.

    def _arrival(self, line: tuple[str, int]) -> float:
        at = max(self.now + self.random.choice((0.0, 0.0, 0.1, 0.5, 2.0)), self._last_arrival.get(line, 0.0))
        self._last_arrival[line] = at
        return at

    def send_up(self, rank: int, event: Event) -> None:
        for _ in range(1 + (self.random.random() < self.plan.repeats)):
            self._counter += 1
            self.up.append((self._arrival(("up", rank)), self._counter, event))

    def tell(self, rank: SimRank, message: RankMessage) -> None:
        self.send_up(rank.number, FromRank(message=message))

    def coordinate(self, event: Event) -> bool:
        """Carries out the effects; True where a request was refused."""
        refused = False
        self.events += not isinstance(event, Tick)
        if self.plan.daemon_dies_after is not None and self.events > self.plan.daemon_dies_after and not self.daemon_dead:
            self.daemon_dead = True
            self.down = [message for message in self.down if self.random.random() < 0.5]
        if self.daemon_dead:
            return False
        for effect in self.coordinator.handle(event, now=self.now):
            if isinstance(effect, Tell):
                if isinstance(effect.order, Commit) and effect.order not in self.commits:
                    self.commits.append(effect.order)
                for _ in range(1 + (self.random.random() < self.plan.repeats)):
                    self._counter += 1
                    self.down.append((self._arrival(("down", effect.rank)), self._counter, effect.rank, effect.order))
            elif isinstance(effect, Closed):
                self.closed.append(effect)
            elif isinstance(effect, Refusal):
                refused = True
        return refused

    # The ranks: each a generator that yields while it waits.

    def run_rank(self, rank: SimRank) -> Iterator[None]:
        hello = RankHello(rank=rank.number, local_rank=0, world_size=self.plan.world, pid=1, attempt=0, host="h", version="0")
        self.coordinate(FromRank(message=hello))  # long before the first step
        for step in range(self.plan.steps):
            yield from self.boundary(rank)
            if rank.end:
                return
            self.request_stops(step)
            if (rank.number, step) in self.plan.bad:
                yield from self.hold(rank, step)
                if rank.end:
                    return
            rank.entered = step
            while not all(other.entered >= step for other in self.ranks):
                if any(other.end in ("killed", "raised", "left", "finished") and other.entered < step for other in self.ranks):
                    self.die(rank, "broken")  # the collective fails: a peer is gone
                    return
                yield
            if (rank.number, step) in self.plan.kills:
                self.die(rank, "killed")
                return
            yield from self.gate(rank, step)
            if rank.end:
                return
        yield from self.boundary(rank)
        if not rank.end:
            rank.end = "finished"
            self.tell(rank, Finished(rank=rank.number, passed=rank.half.passed))

    def decide(self, rank: SimRank, propose: Propose) -> None:
        rank.half.decided(propose.generation, self.register.setdefault(propose.generation, propose.commit))

    def request_stops(self, step: int) -> None:
        while self._stops and self._stops[0][0] <= step:
            leave = self._stops[0][1]
            request = StopRequested(kind="order.stop" if leave else "order.checkpoint", by="op", reason="asked", leave=leave)
            if self.coordinate(request):
                return  # refused: the operator asks again later
            self._stops.pop(0)

    def boundary(self, rank: SimRank) -> Iterator[None]:
        began = self.now
        while isinstance(decision := rank.half.at_boundary(now=self.now), Wait | Propose):
            if isinstance(decision, Propose):
                self.decide(rank, decision)
            yield
        rank.longest_wait = max(rank.longest_wait, self.now - began)
        if decision is not None:
            yield from self.act(rank, decision.commit)

    def hold(self, rank: SimRank, step: int) -> Iterator[None]:
        self.tell(rank, Hold(rank=rank.number, step=step, micro_step=0, violation=VIOLATION, timeout_s=HOLD_TIMEOUT))
        began = self.now
        while True:
            decision = rank.half.at_hold(step, deadline=began + HOLD_TIMEOUT, now=self.now)
            if isinstance(decision, Propose):
                self.decide(rank, decision)
            elif not isinstance(decision, Wait):
                break
            yield
        rank.longest_wait = max(rank.longest_wait, self.now - began)
        if isinstance(decision, GivenUp):
            self.die(rank, "raised")
        else:
            assert isinstance(decision, Released)

    def gate(self, rank: SimRank, step: int) -> Iterator[None]:
        began = self.now
        while True:
            decision = rank.half.at_gate(step, now=self.now)
            if isinstance(decision, Propose):
                self.decide(rank, decision)
            elif not isinstance(decision, Wait):
                break
            yield
        rank.longest_wait = max(rank.longest_wait, self.now - began)
        if isinstance(decision, Act):
            yield from self.act(rank, decision.commit)
            if rank.end:
                return
            decision = rank.half.at_gate(step, now=self.now)
        if isinstance(decision, Skip):
            rank.vetoed.append(step)
            self.tell(rank, Vetoed(rank=rank.number, generation=decision.generation, step=step))
        elif isinstance(decision, Pass):
            rank.applied.append(step)

    def act(self, rank: SimRank, commit: Commit) -> Iterator[None]:
        updates = len(rank.applied)
        self.tell(rank, Saving(rank=rank.number, generation=commit.generation, updates_applied=updates))
        yield
        error = "disk full" if rank.number in self.plan.broken_saves else None
        if error is None:
            self.saved.setdefault(commit.generation, set()).add(rank.number)
        self.tell(rank, Saved(rank=rank.number, generation=commit.generation, updates_applied=updates, path=commit.path, error=error))
        deadline, sealed = self.now + commit.grace_s, False
        while True:
            answer = rank.half.answer(commit.generation)
            if isinstance(answer, WriteCommitted) and not sealed:
                sealed = True
                assert self.saved[commit.generation] == set(range(self.plan.world)), "P7: sealed before every part was whole"
                self.sealed.add(commit.generation)
                self.tell(rank, Committed(rank=rank.number, generation=commit.generation))
            elif isinstance(answer, Leave):
                rank.committed_checkpoint = answer.committed
                break
            elif self.now >= deadline:
                break
            yield
        rank.half.done(commit.generation)
        if commit.leave:
            rank.end = "left"
            self.tell(rank, Left(rank=rank.number, generation=commit.generation, updates_applied=updates))

    def die(self, rank: SimRank, how: str) -> None:
        rank.end = "killed" if how == "killed" else "raised"
        self.send_up(rank.number, RankGone(rank=rank.number))

    # The clock

    def run(self) -> World:
        lives = {rank.number: self.run_rank(rank) for rank in self.ranks}
        for _ in range(200_000):
            self.deliver()
            for number in self.random.sample(sorted(lives), len(lives)):
                if self.random.random() < 0.7 and next(lives[number], "over") == "over":
                    del lives[number]
            if not lives and not self.up and not self.down and (self.daemon_dead or self.coordinator.next_deadline() is None):
                return self
            self.pass_time()
        raise AssertionError(
            f"P6: the job did not end; order deadline {self.coordinator.next_deadline()}, ranks {[r.end for r in self.ranks]}"
        )

    def deliver(self) -> None:
        for at, count, event in sorted(self.up, key=lambda one: one[:2]):
            if at <= self.now:
                self.up.remove((at, count, event))
                self.coordinate(event)
        for at, count, number, order in sorted(self.down, key=lambda one: one[:2]):
            if at <= self.now:
                self.down.remove((at, count, number, order))
                rank = self.ranks[number]
                if rank.end is None:
                    for answer in rank.half.handle(order, now=self.now):
                        if isinstance(answer, Propose):
                            self.decide(rank, answer)
                        else:
                            self.tell(rank, answer)

    def pass_time(self) -> None:
        self.now += self.random.choice((0.0, 0.01, 0.1, 0.5))
        self.coordinate(Tick())
