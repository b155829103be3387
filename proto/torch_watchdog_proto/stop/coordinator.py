"""The daemon's half of the stop protocol: brings all ranks of one attempt to the same boundary, or gives up with a reason.

Owns at most one order at a time; knows no socket, clock or file. Every event may come late, twice or never: what does not fit the order at hand
changes nothing, and every order ends by its deadline.

    preparing --all acks--> committed --first Saving--> saving --all Saved--> sealing --Committed--> leaving --all Left--> closed
        |                       |                          |                     |                      |
        +---- missing ack, a rank that is not coupled, a rank that is gone, the deadline ---> given up --+
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, TypeAlias

from torch_watchdog_proto.messages import (
    EXIT_BAD_DATA,
    Abandon,
    Ack,
    Commit,
    Committed,
    Finished,
    Hold,
    Leave,
    Left,
    Noticed,
    Order,
    Policy,
    Prepare,
    RankHello,
    RankMessage,
    Refused,
    Saved,
    Saving,
    Vetoed,
    Violation,
    WriteCommitted,
)

__all__ = [
    "NO_CHECKPOINT",
    "CheckpointFact",
    "Closed",
    "Coordinator",
    "Effect",
    "Event",
    "Found",
    "FromRank",
    "Opened",
    "RankGone",
    "Refusal",
    "SkipBudget",
    "StopRequested",
    "Tell",
    "Tick",
]

OrderKind: TypeAlias = Literal["batch", "order.stop", "order.checkpoint", "order.preemption", "loss.not_finite"]
State: TypeAlias = Literal["preparing", "committed", "saving", "sealing", "leaving"]
NO_CHECKPOINT = "; no checkpoint: "  # in an order's reason, before why
REQUEST_TIMEOUT_S = 10.0  # for the acks of an order that no rank holds for


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class FromRank:
    """A rank's control message."""

    message: RankMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGone:
    """A rank's process has ended, or its control socket has closed."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """An operator, a signal or a rule asks for one boundary of the whole job."""

    kind: OrderKind
    by: str
    reason: str
    exit_code: int = 0
    save: bool = True
    leave: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = FromRank | RankGone | StopRequested | Tick


# Effects


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send an order to a rank."""

    rank: int
    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A rank's guard found a violation. `held`: before the step; `refused`: inside it, the rank raises; `noticed`: nothing was done."""

    rank: int
    step: int
    micro_step: int
    violation: Violation
    how: Literal["held", "refused", "noticed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An order begins."""

    generation: int
    kind: OrderKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFact:
    """The checkpoint of an order; `committed` only where every part is whole, finite and of the same update."""

    path: str
    updates_applied: int
    committed: bool
    finite: bool
    saved_by: tuple[int, ...]
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """An order has ended. `stop_step`: the first step that was not applied; `exit_code` None where the job goes on."""

    generation: int
    kind: OrderKind
    outcome: Literal["done", "given_up"]
    reason: str
    stop_step: int | None
    ranks: tuple[int, ...]
    updates_applied: int | None
    checkpoint: CheckpointFact | None
    exit_code: int | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that cannot be served now, and why."""

    reason: str


Effect: TypeAlias = Tell | Found | Opened | Closed | Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipBudget:
    """Policy skip turns into stop when more than `max_skips` of the last `steps` steps would be skipped."""

    max_skips: int = 10
    steps: int = 1000


@dataclass(slots=True, kw_only=True)
class _Order:
    generation: int
    kind: OrderKind
    reason: str
    veto: int | None
    exit_code: int
    save: bool
    leave: bool
    opened_at: float
    deadline: float
    state: State = "preparing"
    commit: Commit | None = None
    passed: dict[int, int] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    committed: bool = False


class Coordinator:
    """Orders for the ranks of one attempt. `checkpoints_dir` is a path that the ranks know; this class only joins names to it.

    `generation` is that of the last order which an earlier daemon gave this attempt: ranks take no order that is older than one they have seen.
    """

    def __init__(
        self,
        *,
        world_size: int,
        policy: Policy,
        checkpoints_dir: str,
        grace_s: float = 300.0,
        generation: int = 0,
        skip_budget: SkipBudget = SkipBudget(),
    ) -> None:
        self._skip_budget, self._skipped = skip_budget, deque[int](maxlen=skip_budget.max_skips)
        self._world = frozenset(range(world_size))
        self._policy = policy
        self._checkpoints_dir = checkpoints_dir
        self._grace_s = grace_s
        self._here: set[int] = set()
        self._finished: set[int] = set()
        self._generation = generation
        self._order: _Order | None = None

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""
        return self._order.deadline if self._order else None

    def next_generation(self) -> int:
        """A number for an order that is not this class's (a rescue), newer than any before."""
        self._generation += 1
        return self._generation

    def handle(self, event: Event, *, now: float) -> tuple[Effect, ...]:
        """Takes one event; returns what to do."""
        match event:
            case FromRank():
                return self._on_message(event.message, now)
            case RankGone():
                return self._on_gone(event.rank, now)
            case StopRequested():
                return self._on_request(event, now)
            case Tick():
                return self._on_tick(now)

    def _on_message(self, message: RankMessage, now: float) -> tuple[Effect, ...]:
        match message:
            case RankHello():
                return self._on_hello(message.rank)
            case Hold():
                return self._on_hold(message, now)
            case Refused():
                return (_found(message, "refused"),)
            case Noticed():
                return (_found(message, "noticed"),)
            case Ack():
                return self._on_ack(message, now)
            case Saving():
                return self._on_saving(message, now)
            case Saved():
                return self._on_saved(message, now)
            case Committed():
                return self._on_committed(message, now)
            case Vetoed():
                return self._on_vetoed(message, now)
            case Left():
                return self._on_left(message.rank, message.generation, now)
            case Finished():
                self._finished.add(message.rank)
                return self._on_gone(message.rank, now)
            case _:
                return ()

    def _on_hello(self, rank: int) -> tuple[Effect, ...]:
        self._here.add(rank)
        order = self._order
        if order is not None and order.state == "preparing" and rank not in order.passed:
            return (self._tell_prepare(order, rank),)  # it reconnected in the middle
        if order is not None and order.commit is not None and rank not in order.saved:
            return (Tell(rank=rank, order=order.commit),)
        return ()

    # Opening an order

    def _on_hold(self, hold: Hold, now: float) -> tuple[Effect, ...]:
        effects: tuple[Effect, ...] = (_found(hold, "held"),)
        order = self._order
        if order is not None and order.veto == hold.step:
            return effects + ((Tell(rank=hold.rank, order=order.commit),) if order.commit else ())
        if order is not None:
            if _is_skip(order):
                effects += self._close(order, "done", order.reason, now)  # its veto stays with the ranks that have not come to the gate yet
            elif order.veto is not None or order.state not in ("preparing", "committed"):
                return effects + self._abandon_hold(hold, order)
            else:
                effects += self._give_up("a bad batch came first", now)
        leave, reason = self._judge_policy(hold)
        order = self._open("batch", reason, hold.step, EXIT_BAD_DATA, leave, leave, now, hold.timeout_s / 2)
        return effects + self._prepare(order)

    def _judge_policy(self, hold: Hold) -> tuple[bool, str]:
        """Whether the job stops at this batch, and why."""
        reason, budget = hold.violation.summary, self._skip_budget
        if self._policy == "stop":
            return True, reason
        spent = len(self._skipped) == budget.max_skips and (not self._skipped or hold.step - self._skipped[0] < budget.steps)
        if spent:
            return True, f"{reason}; {budget.max_skips} steps of the last {budget.steps} were skipped already, no more is allowed"
        self._skipped.append(hold.step)
        return False, reason

    def _abandon_hold(self, hold: Hold, order: _Order) -> tuple[Effect, ...]:
        reason = f"order {order.generation} ({order.kind}) is under way: {order.reason}"
        return (Tell(rank=hold.rank, order=Abandon(generation=order.generation, reason=reason)),) if order.commit is None else ()

    def _on_request(self, request: StopRequested, now: float) -> tuple[Effect, ...]:
        if self._order is not None:
            return (Refusal(reason=f"order {self._order.generation} ({self._order.kind}) is under way: {self._order.reason}"),)
        missing = self._world - self._here
        if missing:
            return (Refusal(reason=f"ranks {_ranks(missing)} cannot be reached: {len(self._here)} of {len(self._world)} answered so far"),)
        order = self._open(request.kind, request.reason, None, request.exit_code, request.save, request.leave, now, REQUEST_TIMEOUT_S)
        return self._prepare(order)

    def _open(
        self, kind: OrderKind, reason: str, veto: int | None, exit_code: int, save: bool, leave: bool, now: float, timeout_s: float
    ) -> _Order:
        self._generation += 1
        self._order = _Order(
            generation=self._generation, kind=kind, reason=reason, veto=veto, exit_code=exit_code, save=save, leave=leave,
            opened_at=now, deadline=now + timeout_s,
        )  # fmt: skip
        return self._order

    def _prepare(self, order: _Order) -> tuple[Effect, ...]:
        opened = Opened(generation=order.generation, kind=order.kind, reason=order.reason)
        return (opened, *(self._tell_prepare(order, rank) for rank in sorted(self._here)))

    @staticmethod
    def _tell_prepare(order: _Order, rank: int) -> Tell:
        # The ranks' promise outlasts our own deadline: after it nobody of us says Commit any more.
        timeout_s = 2 * (order.deadline - order.opened_at)
        return Tell(rank=rank, order=Prepare(generation=order.generation, veto=order.veto, timeout_s=timeout_s))

    # Agreement

    def _on_ack(self, ack: Ack, now: float) -> tuple[Effect, ...]:
        order = self._order
        if order is None or ack.generation != order.generation or order.state != "preparing":
            return ()
        if order.veto is not None and ack.passed >= order.veto:
            return self._give_up(f"rank {ack.rank} has applied step {ack.passed} already: the ranks are not in step with each other", now)
        order.passed[ack.rank] = ack.passed
        return self._commit(order, now) if self._world <= order.passed.keys() else ()

    def _commit(self, order: _Order, now: float) -> tuple[Effect, ...]:
        # Every rank must stop after the same step, or the next collective hangs: so the maximum, never the first answer.
        stop_after = max(order.passed.values()) + 1 if order.veto is None else None
        first_open_step = order.veto if order.veto is not None else (stop_after or 0) + 1
        order.commit = Commit(
            generation=order.generation, veto=order.veto, stop_after=stop_after, save=order.save, leave=order.leave, exit_code=order.exit_code,
            path=f"{self._checkpoints_dir}/step-{first_open_step}", reason=order.reason, grace_s=self._grace_s,
        )  # fmt: skip
        order.state, order.deadline = "committed", now + self._grace_s
        return tuple(Tell(rank=rank, order=order.commit) for rank in sorted(self._world))

    def _on_vetoed(self, vetoed: Vetoed, now: float) -> tuple[Effect, ...]:
        """Policy skip: the order has ended when every rank has left the step out."""
        order = self._order
        if order is None or vetoed.generation != order.generation or not _is_skip(order):
            return ()
        order.left.add(vetoed.rank)
        return self._close(order, "done", order.reason, now) if self._world <= order.left else ()

    # Saving

    def _on_saving(self, saving: Saving, now: float) -> tuple[Effect, ...]:
        order = self._order
        if order is not None and saving.generation == order.generation and order.state == "committed":
            order.state, order.deadline = "saving", now + self._grace_s
        return ()

    def _on_saved(self, saved: Saved, now: float) -> tuple[Effect, ...]:
        order = self._order
        if order is None or saved.generation != order.generation or order.state not in ("committed", "saving"):
            return ()
        order.saved[saved.rank] = saved
        return self._seal(order, now) if self._world <= order.saved.keys() else ()

    def _seal(self, order: _Order, now: float) -> tuple[Effect, ...]:
        problem = _why_not_whole(order.saved.values())
        if problem is not None:
            order.reason = f"{order.reason}{NO_CHECKPOINT}{problem}"
            return self._leave(order, committed=False, now=now)
        order.state, order.deadline = "sealing", now + self._grace_s
        good = all(part.finite for part in order.saved.values())
        sealing = WriteCommitted(generation=order.generation, manifest=self._manifest(order, good), good=good)
        return (Tell(rank=min(order.saved), order=sealing),)

    @staticmethod
    def _manifest(order: _Order, finite: bool) -> Mapping[str, Any]:
        parts = [order.saved[rank] for rank in sorted(order.saved)]
        files = [{"name": file.name, "size": file.size, "sha256": file.sha256} for part in parts for file in part.files]
        return {
            "updates_applied": parts[0].updates_applied, "format": parts[0].format, "ranks": sorted(order.saved), "finite": finite,
            "kind": order.kind, "reason": order.reason, "files": files,
        }  # fmt: skip

    def _on_committed(self, message: Committed, now: float) -> tuple[Effect, ...]:
        order = self._order
        if order is None or message.generation != order.generation or order.state != "sealing":
            return ()
        if message.error is not None:
            order.reason = f"{order.reason}{NO_CHECKPOINT}{message.error}"
        finite = all(part.finite for part in order.saved.values())
        return self._leave(order, committed=message.error is None and finite, now=now)

    # Leaving

    def _leave(self, order: _Order, *, committed: bool, now: float) -> tuple[Effect, ...]:
        order.state, order.committed, order.deadline = "leaving", committed, now + self._grace_s
        told = tuple(Tell(rank=rank, order=Leave(generation=order.generation, committed=committed)) for rank in sorted(self._world))
        return told if order.leave else told + self._close(order, "done", order.reason, now)

    def _on_left(self, rank: int, generation: int, now: float) -> tuple[Effect, ...]:
        order = self._order
        if order is None or generation != order.generation or order.commit is None:
            return ()
        order.left.add(rank)
        self._here.discard(rank)
        return self._close(order, "done", order.reason, now) if self._world <= order.left else ()

    def _on_gone(self, rank: int, now: float) -> tuple[Effect, ...]:
        self._here.discard(rank)
        order = self._order
        if order is None:
            return ()
        if order.state == "leaving":
            return self._on_left(rank, order.generation, now)
        if rank in self._finished:
            return self._give_up("the training ended before the order's step", now) if self._world <= self._finished else ()
        return self._give_up(f"rank {rank} is gone", now)

    # The end of an order

    def _on_tick(self, now: float) -> tuple[Effect, ...]:
        order = self._order
        if order is None or now < order.deadline:
            return ()
        late = self._world - {"preparing": order.passed.keys(), "leaving": order.left}.get(order.state, order.saved.keys())
        return self._give_up(f"no word from ranks {_ranks(late)} in time ({order.state})", now)

    def _give_up(self, reason: str, now: float) -> tuple[Effect, ...]:
        order = self._order
        if order is None:
            return ()
        undecided = order.state in ("preparing", "committed")
        ending: Order = Abandon(generation=order.generation, reason=reason) if undecided else Leave(generation=order.generation)
        told = tuple(Tell(rank=rank, order=ending) for rank in sorted(self._here))
        return told + self._close(order, "given_up", reason, now)

    def _close(self, order: _Order, outcome: Literal["done", "given_up"], reason: str, now: float) -> tuple[Effect, ...]:
        self._order = None
        commit, updates = order.commit, {part.updates_applied for part in order.saved.values()}
        stop_step = None
        if commit is not None:
            stop_step = commit.veto if commit.veto is not None else (commit.stop_after or 0) + 1
        closed = Closed(
            generation=order.generation, kind=order.kind, outcome=outcome, reason=reason, stop_step=stop_step,
            ranks=tuple(sorted(order.left or order.saved)), updates_applied=updates.pop() if len(updates) == 1 else None,
            checkpoint=_checkpoint(order), exit_code=order.exit_code if order.leave else None, seconds=now - order.opened_at,
        )  # fmt: skip
        return (closed,)


def _is_skip(order: _Order) -> bool:
    """One that is decided and neither saves nor leaves."""
    return order.commit is not None and order.veto is not None and not order.save and not order.leave


def _found(message: Hold | Refused | Noticed, how: Literal["held", "refused", "noticed"]) -> Found:
    return Found(rank=message.rank, step=message.step, micro_step=message.micro_step, violation=message.violation, how=how)


def _why_not_whole(parts: Any) -> str | None:
    """Why the ranks' parts make no checkpoint together, or None."""
    for part in parts:
        if part.error is not None:
            return f"rank {part.rank}: {part.error}"
    updates = {part.rank: part.updates_applied for part in parts}
    if len(set(updates.values())) > 1:
        return f"the ranks have applied different numbers of updates: {updates}"
    return None


def _checkpoint(order: _Order) -> CheckpointFact | None:
    if not order.saved or order.commit is None:
        return None
    parts = order.saved.values()
    first = order.saved[min(order.saved)]
    finite = all(part.finite for part in parts)
    path = PurePosixPath(first.path or order.commit.path)  # a framework's checkpoint has a place of its own
    return CheckpointFact(
        path=str(path if finite else path.with_name(f"not-good.{path.name}")), updates_applied=first.updates_applied, committed=order.committed, finite=finite,
        saved_by=tuple(sorted(order.saved)), format=first.format,
    )  # fmt: skip


def _ranks(ranks: Any) -> str:
    return ", ".join(map(str, sorted(ranks)[:8])) + (" ..." if len(ranks) > 8 else "")
