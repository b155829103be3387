"""The daemon's half of the stop protocol: brings all ranks of one attempt to the same boundary, or gives up with a reason.

Owns at most one order at a time; knows no socket, clock or file. What it does when is the table's (`table.py`), what an event means is `recognise.py`'s: here
are the deeds. Every event may come late, twice or never, and every order ends by its deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal, TypeAlias, TypeVar

from torch_watchdog_proto.messages import (
    EXIT_BAD_DATA,
    Abandon,
    Ack,
    CannotPromise,
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
    Refused,
    Saved,
    Vetoed,
    WriteCommitted,
)
from torch_watchdog_proto.stop.events import (
    IS_GONE,
    NO_CHECKPOINT,
    NO_MORE_SKIPS,
    TRAINING_ENDED,
    CancelRequested,
    Effect,
    Event,
    Found,
    FromRank,
    Opened,
    RankGone,
    Refusal,
    StopRequested,
    Tell,
    aim_of,
)
from torch_watchdog_proto.stop.order import OpenOrder, closed, commit_of, is_skip, manifest_of, ranks_in_words, why_not_good, why_not_whole
from torch_watchdog_proto.stop.recognise import Ranks, recognise
from torch_watchdog_proto.stop.table import TABLE, Deed, Row, State, Trigger

__all__ = ["MAX_SKIPS", "Coordinator"]

REQUEST_TIMEOUT_S = 10.0  # for the acks of an order that no rank holds for
MAX_SKIPS, OF_STEPS = 10, 1000  # policy skip turns into stop when more than so many of the last steps would be left out
_Deed: TypeAlias = Callable[[Event, float], tuple[Effect, ...]]
_M = TypeVar("_M")


class Coordinator:
    """Orders for the ranks of one attempt. `checkpoints_dir` is a path that the ranks know; this class only joins names to it.

    `generation` is that of the last order which an earlier daemon gave this attempt: ranks take no order that is older than one they have seen.
    """

    table: ClassVar[Mapping[tuple[State, Trigger], Row]] = TABLE

    def __init__(
        self,
        *,
        world_size: int,
        policy: Policy,
        checkpoints_dir: str,
        grace_s: float = 300.0,
        generation: int = 0,
        max_skips: int = MAX_SKIPS,
    ) -> None:
        self._max_skips = min(max_skips, OF_STEPS)
        self._skipped = deque[int](maxlen=self._max_skips)
        self._ranks = Ranks(world=frozenset(range(world_size)))
        self._policy = policy
        self._checkpoints_dir = checkpoints_dir
        self._grace_s = grace_s
        self._generation = generation
        self._order: OpenOrder | None = None
        self._deeds: Mapping[Deed, _Deed] = {
            "open": self._open, "open_anew": self._open_anew, "refuse": self._refuse, "say_again": self._say_again, "note": self._note,
            "commit": self._commit, "seal": self._seal, "leave": self._leave, "go_on": self._go_on, "close": self._close, "give_up": self._give_up,
        }  # fmt: skip

    @property
    def state(self) -> State:
        return "idle" if self._order is None else self._order.state

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""
        return self._order.deadline if self._order else None

    def next_generation(self) -> int:
        """A number for an order that is not this class's (a rescue), newer than any before."""
        self._generation += 1
        return self._generation

    def handle(self, event: Event, *, now: float) -> tuple[Effect, ...]:
        """Takes one event; returns what to do."""
        found = self._note_ranks(event)
        trigger = recognise(event, self._order, self._ranks, now)
        row = None if trigger is None else self.table.get((self.state, trigger))
        return found if row is None else (*found, *self._take(row, event, now))

    def _take(self, row: Row, event: Event, now: float) -> tuple[Effect, ...]:
        effects = self._deeds[row.deed](event, now)
        order = self._order
        if order is not None and order.state != row.next:
            order.state, order.deadline = row.next, now + self._grace_s
        return effects

    def _note_ranks(self, event: Event) -> tuple[Effect, ...]:
        """What is so whatever order is under way: who can be spoken to, and what a guard has found."""
        ranks = self._ranks
        if isinstance(event, RankGone):
            ranks.here.discard(event.rank)
        if not isinstance(event, FromRank):
            return ()
        match message := event.message:
            case RankHello():
                ranks.here.add(message.rank)
            case Finished():
                ranks.finished.add(message.rank)
                ranks.here.discard(message.rank)
            case Hold():
                return (_found(message, "held"),)
            case Refused():
                return (_found(message, "refused"),)
            case Noticed():
                return (_found(message, "noticed"),)
        return ()

    # Opening an order

    def _open(self, event: Event, now: float) -> tuple[Effect, ...]:
        order = self._order = self._asked_for(event, now)
        opened = Opened(generation=order.generation, kind=order.kind, reason=order.reason)
        return (opened, *self._tell(self._ranks.here, self._prepare(order)))

    def _open_anew(self, event: Event, now: float) -> tuple[Effect, ...]:
        """A skip that is decided stays with the ranks whatever comes; anything else is taken back."""
        order = self._under_way()
        ended = self._end("done", order.reason, now) if is_skip(order) else self._give_up(event, now)
        return ended + self._open(event, now)

    def _asked_for(self, event: Event, now: float) -> OpenOrder:
        self._generation += 1
        if isinstance(event, StopRequested):
            return OpenOrder(
                generation=self._generation, kind=event.kind, reason=event.reason, veto=None, exit_code=event.exit_code, save=event.save,
                leave=event.leave, opened_at=now, deadline=now + REQUEST_TIMEOUT_S,
            )  # fmt: skip
        hold = _message(event, Hold)
        stops, reason = self._judge_policy(hold)
        return OpenOrder(
            generation=self._generation, kind="batch", reason=reason, veto=hold.step, exit_code=EXIT_BAD_DATA, save=stops, leave=stops,
            opened_at=now, deadline=now + hold.timeout_s / 2,
        )  # fmt: skip

    def _judge_policy(self, hold: Hold) -> tuple[bool, str]:
        """Whether the job stops at this batch, and why."""
        reason = hold.violation.summary
        if self._policy == "stop":
            return True, reason
        if len(self._skipped) == self._max_skips and (not self._skipped or hold.step - self._skipped[0] < OF_STEPS):
            return True, f"{reason}{NO_MORE_SKIPS}{_budget_used(self._max_skips)}"
        self._skipped.append(hold.step)
        return False, reason

    @staticmethod
    def _prepare(order: OpenOrder) -> Prepare:
        # The ranks' promise outlasts our own deadline: after it nobody of us says Commit any more.
        return Prepare(generation=order.generation, veto=order.veto, timeout_s=2 * (order.deadline - order.opened_at))

    def _refuse(self, event: Event, _now: float) -> tuple[Effect, ...]:
        order, ranks = self._order, self._ranks
        if order is None and isinstance(event, CancelRequested):
            return (Refusal(reason="no order is under way"),)
        if order is None:
            missing = ranks_in_words(ranks.world - ranks.here)
            return (Refusal(reason=f"{missing} cannot be reached: {len(ranks.here)} of {len(ranks.world)} answered so far"),)
        why_not = ""
        if isinstance(event, CancelRequested):
            undecided = order.state == "preparing"
            why_not = ", which nobody asked for" if undecided else " and decided: it cannot be taken back any more"
        return (Refusal(reason=f"order {order.generation} ({order.kind}) is under way{why_not}: {order.reason}"),)

    # Agreement

    def _say_again(self, event: Event, _now: float) -> tuple[Effect, ...]:
        """To the rank that spoke: the newest word of the order."""
        order = self._under_way()
        words: Mapping[State, Order | None] = {
            "preparing": self._prepare(order), "committed": order.commit, "saving": order.commit,
            "sealing": self._to_seal(order) if order.state == "sealing" else None,
            "leaving": Leave(generation=order.generation, committed=order.committed),
        }  # fmt: skip
        word = words[order.state]
        return self._tell({_rank(event)}, word) if word is not None else ()

    def _note(self, event: Event, _now: float) -> tuple[Effect, ...]:
        order = self._under_way()
        if isinstance(event, RankGone):
            order.left.add(event.rank)
            return ()
        if isinstance(event, FromRank):
            match message := event.message:
                case Ack():
                    order.passed[message.rank] = message.passed
                case Saved():
                    order.saved[message.rank] = message
                case Vetoed() | Finished():
                    order.left.add(message.rank)
                case Left():
                    order.left.add(message.rank)
                    self._ranks.here.discard(message.rank)
        return ()

    def _commit(self, event: Event, now: float) -> tuple[Effect, ...]:
        self._note(event, now)
        order = self._under_way()
        order.commit = commit_of(order, checkpoints_dir=self._checkpoints_dir, grace_s=self._grace_s)
        return self._tell(self._ranks.world, order.commit)

    # Saving and leaving

    def _seal(self, event: Event, now: float) -> tuple[Effect, ...]:
        self._note(event, now)
        order = self._under_way()
        return self._tell({min(order.saved)}, self._to_seal(order))

    @staticmethod
    def _to_seal(order: OpenOrder) -> WriteCommitted:
        return WriteCommitted(generation=order.generation, manifest=manifest_of(order), good=order.is_finite)

    def _leave(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Everything that can be done for the checkpoint is done."""
        self._note(event, now)
        order = self._under_way()
        sealed = isinstance(event, FromRank) and isinstance(event.message, Committed)
        problem = _message(event, Committed).error if sealed else why_not_whole(order.saved.values())
        if why := problem or why_not_good(order.saved.values()):
            order.reason = f"{order.reason}{NO_CHECKPOINT}{why}"
        order.committed = problem is None and order.is_finite
        return self._tell(self._ranks.world, Leave(generation=order.generation, committed=order.committed))

    def _go_on(self, event: Event, now: float) -> tuple[Effect, ...]:
        told = self._leave(event, now)
        return told + self._end("done", self._under_way().reason, now)

    # The end of an order

    def _close(self, event: Event, now: float) -> tuple[Effect, ...]:
        self._note(event, now)
        return self._end("done", self._under_way().reason, now)

    def _give_up(self, event: Event, now: float) -> tuple[Effect, ...]:
        order, reason = self._under_way(), self._why_given_up(event)
        undecided = order.state in ("preparing", "committed")
        aim = aim_of(order.kind, leaves=order.leave)
        ending: Order = Abandon(generation=order.generation, reason=reason, aim=aim) if undecided else Leave(generation=order.generation)
        return self._tell(self._ranks.here, ending) + self._end("given_up", reason, now)

    def _why_given_up(self, event: Event) -> str:
        match event:
            case CancelRequested():
                return f"taken back by {event.by}"
            case RankGone():
                return event.why or f"rank {event.rank} {IS_GONE}"
            case FromRank(message=Ack() as ack):
                return f"rank {ack.rank} has applied step {ack.passed} already: the ranks are not in step with each other"
            case FromRank(message=CannotPromise() as word):
                return f"rank {word.rank} can promise nothing: {word.reason}"
            case FromRank(message=Hold()):
                return "a bad batch came first"
            case FromRank():
                return TRAINING_ENDED
        order = self._under_way()
        heard = {"preparing": order.passed.keys(), "leaving": order.left}.get(order.state, order.saved.keys())
        return f"no word from {ranks_in_words(self._ranks.world - heard)} in time ({order.state})"

    def _end(self, outcome: Literal["done", "given_up"], reason: str, now: float) -> tuple[Effect, ...]:
        order, self._order = self._under_way(), None
        return (closed(order, outcome, reason, now=now),)

    # Words

    def _under_way(self) -> OpenOrder:
        if self._order is None:
            raise AssertionError("a row of the table leads to a deed for which an order must be under way")
        return self._order

    @staticmethod
    def _tell(ranks: Iterable[int], order: Order) -> tuple[Effect, ...]:
        return tuple(Tell(rank=rank, order=order) for rank in sorted(ranks))


def _budget_used(max_skips: int) -> str:
    already = (
        f"{max_skips} {'step' if max_skips == 1 else 'steps'} of the last {OF_STEPS} were left out already"
        if max_skips
        else "no step may be left out"
    )
    return f"{already} (max_skips = {max_skips}): this batch stops the job"


def _message(event: Event, kind: type[_M]) -> _M:
    if not isinstance(event, FromRank) or not isinstance(event.message, kind):
        raise TypeError(f"the table leads {event} to a deed for a {kind.__name__}")
    return event.message


def _rank(event: Event) -> int:
    if not isinstance(event, FromRank):
        raise TypeError(f"{event} comes from no rank")
    return event.message.rank


def _found(message: Hold | Refused | Noticed, how: Literal["held", "refused", "noticed"]) -> Found:
    return Found(rank=message.rank, step=message.step, micro_step=message.micro_step, violation=message.violation, how=how)
