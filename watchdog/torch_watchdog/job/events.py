"""What happens to a job, and what a job wants done: the vocabulary of `Job.handle`.

Owns dataclasses only; knows no socket, file or clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch_watchdog_proto.envelopes import OrderKind, TellRank
from torch_watchdog_proto.messages import NodeGoodbye, NodeHello, NodeReport, RankMessage

__all__ = [
    "AppendEvent",
    "Effect",
    "Event",
    "NodeAway",
    "NodeJoined",
    "NodeLeft",
    "OrderRequested",
    "RankGone",
    "RankSpoke",
    "Refused",
    "ReportCame",
    "SendOrder",
    "Tick",
    "WriteIncident",
    "WriteStacks",
]

# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node process said hello, for the first time or again after a lost connection."""

    hello: NodeHello


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAway:
    """The line of a node has broken: its node process was killed, or the network has lost it. It may come back."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCame:
    """A report that was not seen before."""

    node: str
    report: NodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpoke:
    """A rank's control message."""

    node: str
    attempt: int
    message: RankMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGone:
    """A rank's control socket closed."""

    attempt: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """The wrapped command of a node has ended, and everything that its ranks left behind was reported."""

    node: str
    goodbye: NodeGoodbye


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRequested:
    """A person asks for a boundary of the whole job, or takes back what was asked for before."""

    kind: OrderKind
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = NodeJoined | NodeAway | ReportCame | RankSpoke | RankGone | NodeLeft | OrderRequested | Tick


# Effects


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """Tell a rank, by way of its node."""

    node: str
    tell: TellRank


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteIncident:
    """Write the incident as it is now; with the contract of `contract_of_rank` beside it, where that rank left one."""

    incident: Mapping[str, Any]
    contract_of_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEvent:
    """One line of events.jsonl."""

    event: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The order that was requested cannot be given now, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStacks:
    """Where every rank was, beside the incident."""

    incident_id: str
    text: str


Effect: TypeAlias = SendOrder | WriteIncident | WriteStacks | AppendEvent | Refused
