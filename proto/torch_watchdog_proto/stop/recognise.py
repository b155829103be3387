"""What an event means for the order under way: the trigger of the transition table, or nothing where it is late, repeated, or of another order."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from torch_watchdog_proto.messages import Ack, CannotPromise, Committed, Finished, Hold, Left, RankHello, RankMessage, Saved, Saving, Vetoed
from torch_watchdog_proto.stop.events import CancelRequested, Event, FromRank, RankGone, StopRequested, Tick
from torch_watchdog_proto.stop.order import OpenOrder, is_skip, why_not_whole
from torch_watchdog_proto.stop.table import Trigger

__all__ = ["Ranks", "recognise"]


@dataclass(slots=True, kw_only=True)
class Ranks:
    """The ranks of the attempt. `here`: those that can be spoken to; `finished`: those whose training has ended by itself."""

    world: frozenset[int]
    here: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)


def recognise(event: Event, order: OpenOrder | None, ranks: Ranks, now: float) -> Trigger | None:
    """The trigger of `event`. Changes nothing."""
    match event:
        case StopRequested():
            return "request" if order is not None or ranks.world <= ranks.here else "request_too_early"
        case CancelRequested():
            return "cancel_of_hold" if order is not None and order.veto is not None and order.state == "preparing" else "cancel"
        case Tick():
            return "deadline" if order is not None and now >= order.deadline else None
        case RankGone():
            return _gone(event.rank, order, ranks)
        case FromRank():
            return _said(event.message, order, ranks)


def _said(message: RankMessage, order: OpenOrder | None, ranks: Ranks) -> Trigger | None:
    if isinstance(message, Hold):
        return _held(message, order)
    if order is None:
        return None
    match message:
        case RankHello():
            return "hello" if _may_have_missed(message.rank, order) else None
        case Finished():
            return _gone(message.rank, order, ranks)
        case Ack() | CannotPromise() | Vetoed() | Saving() | Saved() | Committed() | Left() if message.generation == order.generation:
            return _answered(message, order, ranks.world)
    return None


def _held(hold: Hold, order: OpenOrder | None) -> Trigger | None:
    if order is None:
        return "hold"
    if order.veto == hold.step:
        return "hold_of_same_step"
    if is_skip(order):
        return "hold_after_skip"
    return "hold" if order.veto is None else None  # another step's hold ends by its own deadline


def _may_have_missed(rank: int, order: OpenOrder) -> bool:
    """Whether a rank that connects again may lack the newest word."""
    match order.state:
        case "preparing":
            return rank not in order.passed
        case "committed" | "saving":
            return rank not in order.saved
        case "sealing":
            return rank == min(order.saved)
    return rank not in order.left


def _answered(
    message: Ack | CannotPromise | Vetoed | Saving | Saved | Committed | Left, order: OpenOrder, world: Set[int]
) -> Trigger | None:
    match message:
        case Ack():
            return _promised(message, order, world)
        case CannotPromise():
            return "cannot_promise"
        case Vetoed() if is_skip(order):
            return "last_vetoed" if world <= order.left | {message.rank} else "vetoed"
        case Saving():
            return "saving"
        case Saved():
            return _wrote(message, order, world)
        case Committed():
            return "sealed" if order.leave else "sealed_go_on"
        case Left() if order.commit is not None:
            return "last_left" if world <= order.left | {message.rank} else "left"
    return None


def _promised(ack: Ack, order: OpenOrder, world: Set[int]) -> Trigger:
    if order.veto is not None and ack.passed >= order.veto:
        return "ack_past_gate"
    return "last_ack" if world <= order.passed.keys() | {ack.rank} else "ack"


def _wrote(part: Saved, order: OpenOrder, world: Set[int]) -> Trigger:
    parts = {**order.saved, part.rank: part}
    if not world <= parts.keys():
        return "saved"
    if why_not_whole(parts.values()) is None:
        return "all_whole"
    return "not_whole" if order.leave else "not_whole_go_on"


def _gone(rank: int, order: OpenOrder | None, ranks: Ranks) -> Trigger | None:
    if order is None:
        return None
    if order.state == "leaving":
        return "last_left" if ranks.world <= order.left | {rank} else "left"
    if rank in order.left and not is_skip(order):
        return None
    if rank in ranks.finished:
        unheard = order.state == "preparing" and rank not in order.passed
        return "finished" if unheard or ranks.world <= ranks.finished else None
    return "gone"
