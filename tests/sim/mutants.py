"""Ten and more deliberate bugs of the stop protocol: if the simulation did not find one of them, it would prove nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch_watchdog_proto.messages import Ack, CannotPromise, Commit, Order, Prepare
from torch_watchdog_proto.stop.coordinator import Coordinator
from torch_watchdog_proto.stop.events import Event, FromRank
from torch_watchdog_proto.stop.participant import Participant, Pass, Propose, Skip
from torch_watchdog_proto.stop.table import TABLE, Deed, Row, State, Trigger

__all__ = ["MUTANTS"]


def _table(*rows: tuple[State, Trigger, State, Deed]) -> Mapping[tuple[State, Trigger], Row]:
    """The table with these rows in place of its own."""
    return {**TABLE, **{(state, trigger): Row(state, trigger, following, deed, "a bug") for state, trigger, following, deed in rows}}


# The coordinator


class CommitsAtTheFirstAnswer(Coordinator):
    table = _table(("preparing", "ack", "committed", "commit"))


class TakesSilenceForAYes(Coordinator):
    table = _table(("preparing", "deadline", "committed", "commit"))


class OverlooksWhoIsPastTheGate(Coordinator):
    table = _table(("preparing", "ack_past_gate", "committed", "commit"))


class TakesARefusalForAYes(Coordinator):
    def handle(self, event: Event, *, now: float) -> Any:
        if isinstance(event, FromRank) and isinstance(event.message, CannotPromise):
            event = FromRank(message=Ack(rank=event.message.rank, generation=event.message.generation, passed=-1))
        return super().handle(event, now=now)


class ForgetsTheDeadline(Coordinator):
    table: ClassVar = {key: row for key, row in TABLE.items() if key != ("saving", "deadline")}


class SealsTheFirstPart(Coordinator):
    table = _table(("saving", "saved", "sealing", "seal"), ("committed", "saved", "sealing", "seal"))


class SealsWhatIsNotWhole(Coordinator):
    table = _table(("saving", "not_whole", "sealing", "seal"), ("saving", "not_whole_go_on", "sealing", "seal"))


class StopsAtTheSlowestRank(Coordinator):
    """The minimum of the answers, where it must be the maximum."""

    def _commit(self, event: Event, now: float) -> Any:
        told = super()._commit(event, now)
        order = self._under_way()
        if order.commit is None or order.commit.stop_after is None:
            return told
        order.commit = replace(order.commit, stop_after=min(order.passed.values()) + 1)
        return self._tell(self._ranks.world, order.commit)


class CallsEverythingGood(Coordinator):
    def _tell(self, ranks: Any, order: Any) -> Any:  # type: ignore[override]
        return super()._tell(ranks, replace(order, good=True) if hasattr(order, "good") else order)


class ListensToOldAnswers(Coordinator):
    """Of whatever order."""

    def handle(self, event: Event, *, now: float) -> Any:
        if isinstance(event, FromRank) and isinstance(event.message, Ack) and self._order is not None:
            event = FromRank(message=replace(event.message, generation=self._order.generation))
        return super().handle(event, now=now)


# The participant


class ActsWithoutTheRegister(Participant):
    def _on_commit(self, order: Commit) -> Any:
        for _ in super()._on_commit(order):
            self.decided(order.generation, order)
        return ()


class _GoesOn(Participant):
    def at_boundary(self, *, now: float) -> Any:
        decision = super().at_boundary(now=now)
        return None if isinstance(decision, Pass) else decision


class AbandonsWithoutTheRegister(_GoesOn):
    """Whoever runs out of time goes on, whatever the others have decided."""

    def _until_decided(self, now: float) -> Any:
        decision = super()._until_decided(now)
        if isinstance(decision, Propose):
            self.decided(decision.generation, None)
            return Pass()
        return decision


class DoesNotKeepItsPromise(_GoesOn):
    """Passes the gate that it has promised not to pass before the decision."""

    def _until_decided(self, now: float) -> Any:
        return Pass() if self._prepared is not None and self._prepared.veto is None else super()._until_decided(now)


class ForgetsAVetoForANewerOrder(Participant):
    def _on_prepare(self, order: Prepare, phase: Any, now: float) -> Any:
        if order.generation > self._generation:
            self._vetoes.clear()
        return super()._on_prepare(order, phase, now)


class LetsANewerOrderDisplaceAnUndecidedOne(Participant):
    def _on_prepare(self, order: Prepare, phase: Any, now: float) -> Any:
        if order.generation > self._generation:
            self._forget()
        return super()._on_prepare(order, phase, now)


class HeedsOldOrders(Participant):
    def handle(self, order: Order, **situation: Any) -> Any:
        return super().handle(replace(order, generation=max(order.generation, self._generation)), **situation)


class AppliesWhatItVetoed(Participant):
    """A second optimizer of the window, say."""

    def at_gate(self, step: int, *, now: float) -> Any:
        decision = super().at_gate(step, now=now)
        return Pass() if isinstance(decision, Skip) and self.rank == 1 else decision


class PromisesTooMuch(Participant):
    """Answers with what it had passed at the last order."""

    def _on_prepare(self, order: Prepare, phase: Any, now: float) -> Any:
        return tuple(
            replace(word, passed=max(-1, word.passed - 1)) if isinstance(word, Ack) else word
            for word in super()._on_prepare(order, phase, now)
        )


MUTANTS: Mapping[str, dict[str, Any]] = {
    kind.__name__: {"coordinator" if issubclass(kind, Coordinator) else "participant": kind}
    for kind in (
        CommitsAtTheFirstAnswer, TakesSilenceForAYes, OverlooksWhoIsPastTheGate, TakesARefusalForAYes, ForgetsTheDeadline, SealsTheFirstPart,
        SealsWhatIsNotWhole, StopsAtTheSlowestRank, CallsEverythingGood, ListensToOldAnswers, ActsWithoutTheRegister, AbandonsWithoutTheRegister,
        DoesNotKeepItsPromise, ForgetsAVetoForANewerOrder, LetsANewerOrderDisplaceAnUndecidedOne, HeedsOldOrders, AppliesWhatItVetoed,
        PromisesTooMuch,
    )
}  # fmt: skip
