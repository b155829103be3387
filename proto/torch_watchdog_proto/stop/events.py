"""What the coordinator of the stop protocol is told, and what it tells its shell to do: frozen words, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch_watchdog_proto.messages import Order, RankMessage, Violation

__all__ = [
    "NO_CHECKPOINT",
    "TRAINING_ENDED",
    "NO_MORE_SKIPS",
    "CancelRequested",
    "CheckpointFact",
    "Closed",
    "Effect",
    "Event",
    "Found",
    "FromRank",
    "Opened",
    "OrderKind",
    "RankGone",
    "Refusal",
    "StopRequested",
    "Tell",
    "Tick",
    "aim_of",
    "why_no_more_skips",
]

OrderKind: TypeAlias = Literal["batch", "order.stop", "order.checkpoint", "order.preemption", "loss.not_finite"]
TRAINING_ENDED = "the training ended before it could be carried out"  # a reason of an order that was given up
IS_GONE = "is gone"  # of a rank, in the same: the order gave way to its failure
NO_CHECKPOINT = "; no checkpoint: "  # in an order's reason, before why
NO_MORE_SKIPS = "; no more skips: "  # the same, of policy skip that stops


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class FromRank:
    """A rank's control message."""

    message: RankMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGone:
    """A rank's process has ended, or its control socket has closed; or `why` else nobody can speak to it any more."""

    rank: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """An operator, a signal or a rule asks for one boundary of the whole job."""

    kind: OrderKind
    by: str
    reason: str
    exit_code: int = 0
    save: bool = True
    leave: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Somebody takes an order back. Too late once it is decided: some ranks may have acted on it by then."""

    by: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = FromRank | RankGone | StopRequested | CancelRequested | Tick


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


def aim_of(kind: OrderKind, *, leaves: bool) -> str:
    """What an order was for, in the words of who reads of it at night."""
    match kind:
        case "batch":
            return "the stop for the bad batch" if leaves else "the skip of the bad batch"
        case "order.stop":
            return "the stop that was asked for"
        case "order.checkpoint":
            return "the checkpoint that was asked for"
        case "order.preemption":
            return "the stop before the machine is taken away"
        case "loss.not_finite":
            return "the stop for a loss that is no number"


def why_no_more_skips(reason: str) -> str:
    """Of an order's reason: why policy skip stops the job, empty where it does not."""
    return reason.partition(NO_MORE_SKIPS)[2].partition(NO_CHECKPOINT)[0]
