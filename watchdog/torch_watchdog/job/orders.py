"""The orders of one attempt as the job gives them: what was asked for and cannot be given yet, what is under way, and what comes of it.

Owns the daemon's half of the stop protocol (`stop/coordinator.py`), and what a rule or a signal still wants. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch_watchdog.job.casebook import Casebook
from torch_watchdog.job.ending import Ending
from torch_watchdog.job.event_log import EventLog
from torch_watchdog.job.events import AppendEvent, Effect, Refused, WriteIncident
from torch_watchdog.job.ranks import RankState, with_the_stopped
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.exit_codes import exit_code_of
from torch_watchdog_proto.stop import events as stop
from torch_watchdog_proto.stop.coordinator import MAX_SKIPS, Coordinator

__all__ = ["Orders", "Shared"]

_RETRY_S = 1.0  # for an order of a rule that could not be given at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What outlives an attempt. `away`: nodes that cannot be reached. `rules`: thresholds that the launch changes."""

    policy: m.Policy
    checkpoints_dir: str
    grace_s: float
    casebook: Casebook
    log: EventLog
    away: set[str]
    rules: Mapping[str, Any]
    max_skips: int | None


class Orders:
    """`send` takes an order to its rank; `again` is asked, once an order is over, for what it had kept from the coordinator."""

    def __init__(
        self,
        number: int,
        shared: Shared,
        *,
        ranks: dict[int, RankState],
        ending: Ending,
        send: Callable[[stop.Tell], Iterable[Effect]],
        again: Callable[[float], Iterable[Effect]],
    ) -> None:
        self.is_open = self._is_asked_for = False
        self._number, self._shared, self._ranks, self._ending, self._send, self._again = number, shared, ranks, ending, send, again
        self._world_size = 0
        self._coordinator: Coordinator | None = None
        self._wanted: stop.StopRequested | None = None  # by a rule or a signal, not yet given
        self._given: stop.StopRequested | None = None  # and what of that is under way
        self._retry_at = 0.0

    def begin(self, world_size: int) -> None:
        """A rank is there, and with it the number of all."""
        shared, self._world_size = self._shared, world_size
        self._coordinator = Coordinator(
            world_size=world_size, policy=shared.policy, checkpoints_dir=shared.checkpoints_dir, grace_s=shared.grace_s,
            generation=shared.log.last_generation(self._number), max_skips=MAX_SKIPS if shared.max_skips is None else shared.max_skips,
        )  # fmt: skip

    @property
    def are_possible(self) -> bool:
        return self._coordinator is not None

    @property
    def awaits_step(self) -> bool:
        """Whether an order that was asked for waits until the ranks come to where it acts: nobody holds a batch or saves."""
        return (
            self.is_open and self._is_asked_for and self._coordinator is not None and self._coordinator.state in ("preparing", "committed")
        )

    @property
    def deadline(self) -> float | None:
        order = self._coordinator.next_deadline() if self._coordinator is not None else None
        retry = self._retry_at if self._wanted is not None else None
        return min((time for time in (order, retry) if time is not None), default=None)

    def next_generation(self) -> int:
        return 0 if self._coordinator is None else self._coordinator.next_generation()

    def tick(self, now: float) -> Iterable[Effect]:
        """What is wanted is asked for again once that is due; not while another order is open, which refuses it, to be read each second."""
        if self._wanted is None or now < self._retry_at:
            return ()
        self._retry_at = now + _RETRY_S
        return () if self.is_open else self.want(self._wanted, now)

    def want(self, request: stop.StopRequested, now: float) -> Iterable[Effect]:
        """An order of a rule: asked again until it can be given, because another order may be under way."""
        self._wanted, self._retry_at = request, now + _RETRY_S
        return [effect for effect in self.tell(request, now) if not isinstance(effect, Refused)]

    def tell(self, event: stop.Event, now: float) -> Iterable[Effect]:
        """Something has happened that an order may depend on: a word of a rank, a request, the time."""
        if self._coordinator is None:
            return ()
        effects: list[Effect] = []
        given, was_open = self._given, self.is_open
        for effect in self._coordinator.handle(event, now=now):
            effects += self._on_stop_effect(effect, now)
        if was_open and not self.is_open:
            effects += self._again(now)
        if given is not None and self._given is None and self._shared.policy == "skip" and _is_hold(event):
            self._wanted, self._retry_at = given, now + _RETRY_S  # a bad batch came first: the training goes on after it
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
                return (Refused(reason=effect.reason), self._event(now, "order.refused", text=f"order refused: {effect.reason}"))

    def _on_found(self, found: stop.Found, now: float) -> Iterable[Effect]:
        if found.violation.culprit in self._ranks:
            found = replace(found, rank=found.violation.culprit)
        new = self._shared.casebook.found(found, self._ranks, now, world_size=self._world_size)
        if new is not None:
            yield self._event(now, "incident", rank=found.rank, step=found.step, text=new["summary"], incident=new["id"], how=found.how)
            yield WriteIncident(incident=new, contract_of_rank=found.rank)

    def _on_opened(self, opened: stop.Opened, now: float) -> Iterable[Effect]:
        self.is_open, self._is_asked_for = True, opened.kind.startswith("order.")
        if self._wanted is not None and self._wanted.kind == opened.kind:
            self._given, self._wanted = self._wanted, None
        text = f"order {opened.generation} ({opened.kind}) begins: {opened.reason}"
        yield self._event(now, "order.opened", text=text, generation=opened.generation, order_kind=opened.kind)
        for changed in self._shared.casebook.opened(opened, self._ranks, now):
            yield WriteIncident(incident=changed, contract_of_rank=None)

    def _on_closed(self, closed: stop.Closed, now: float) -> Iterable[Effect]:
        self.is_open, self._given = False, None
        self._ending.closed(closed := _honest(with_the_stopped(closed, self._ranks.values())))
        ending = "is done" if closed.outcome == "done" else "was given up"
        text = f"order {closed.generation} ({closed.kind}) {ending} after {closed.seconds:.2f} s: {closed.reason}"
        yield self._event(
            now, "order.closed", step=closed.stop_step, text=text, generation=closed.generation, outcome=closed.outcome,
            exit_code=closed.exit_code,
        )  # fmt: skip
        for changed in self._shared.casebook.closed(closed):
            yield WriteIncident(incident=changed, contract_of_rank=None)

    def _event(self, now: float, kind: str, *, text: str, **more: Any) -> AppendEvent:
        return self._shared.log.line(now, kind, attempt=self._number, text=text, **more)


def _honest(closed: stop.Closed) -> stop.Closed:
    """With the exit code that what came of it bears out."""
    if closed.exit_code is None:
        return closed
    saved = closed.checkpoint is not None and closed.checkpoint.committed
    return replace(closed, exit_code=exit_code_of(closed.exit_code, saved=saved))


def _is_hold(event: stop.Event) -> bool:
    return isinstance(event, stop.FromRank) and isinstance(event.message, m.Hold)
