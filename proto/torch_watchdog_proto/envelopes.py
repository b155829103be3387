"""The envelopes that node process, daemon and command line put the words of `messages.py` into, as frozen dataclasses.

Owns who-says-it-to-whom: answers of the daemon, control messages with their attempt, and what a query shows. Standard library only; knows
nothing of protobuf or sockets. Incidents travel as their JSON object, because file, wire and `--json` must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch_watchdog_proto.messages import NodeGoodbye, NodeHello, NodeReport, Order, Policy, RankMessage

ShownPhase: TypeAlias = Literal["start", "train", "eval", "saving", "end", "stopped", "asked", "late"]
ShownPolicy: TypeAlias = Literal["stop", "skip", "observe", "scan"]  # the last: it has only looked at its data
OrderKind: TypeAlias = Literal["order.stop", "order.checkpoint", "order.preemption", "order.cancel"]
ORDER_KINDS: tuple[OrderKind, ...] = get_args(OrderKind)

TOKEN_KEY = "torch-watchdog-token"  # noqa: S105 - the metadata entry of every call that carries the caller's token, where one is asked for
LET_IN_KEY = "torch-watchdog-let-in"  # in the metadata by which a daemon answers before anything is said to it

# Telemetry: what a node process says, and what the daemon answers.


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A node of a launch over several nodes asks for the job that the node which hosts it has begun at this rendezvous."""

    rendezvous: str
    host: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """What the node joins, and the name that it has there: two nodes may have one host name. `hosted_by` is the node where `run_dir` is."""

    job: str
    session: str
    node: str
    policy: Policy
    run_dir: str
    hosted_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloAck:
    """The daemon takes the node's reports from `next_seq` on: what is older it has."""

    next_seq: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAck:
    """The report `seq` is kept (or was already). `every_ms`: how far apart this node's reports should be, as many as there are; 0: as it likes."""

    seq: int
    every_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodbyeAck:
    """The end of the job as the daemon sees it. `exit_code` None: the wrapped command's own code stands."""

    exit_code: int | None
    incidents: tuple[Mapping[str, Any], ...] = ()
    lines: tuple[str, ...] = ()


NodeSays: TypeAlias = NodeHello | NodeReport | NodeGoodbye
DaemonAnswers: TypeAlias = HelloAck | ReportAck | GoodbyeAck


# Control: ranks' messages up, orders down, over one stream per node.


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlHello:
    """First words of a node's control stream."""

    job: str
    node: str
    session: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaid:
    """A rank's message, with the launcher's restart count that its process belongs to."""

    attempt: int
    message: RankMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """A rank's socket closed; whether it had said before that it was ending is in the messages before."""

    attempt: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellRank:
    """An order for one rank of this node."""

    attempt: int
    rank: int
    order: Order


ControlUp: TypeAlias = ControlHello | RankSaid | RankLost


# Queries.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The newest that is known of one rank. `last_seen_s` is seconds since the epoch; `alive` is False once its process is gone. `phase` is "stopped"
    where that process is (SIGSTOP), "asked" where an order under way waits for its promise, "late" where the others stand still for it.

    Steps count from 0 in each launch. `updates_applied` counts on from the checkpoint that a launch resumed; `began_at_update` is what it held.
    """

    rank: int
    node: str
    pid: int
    phase: ShownPhase
    alive: bool
    last_step: int | None = None
    loss: float | None = None
    step_time_s: float | None = None
    last_seen_s: float | None = None
    updates_applied: int | None = None
    began_at_update: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job as the daemon sees it now. `state` in words: running, stopping, ended. `lost_records`: overwritten before they could be read.
    `standstill`: who is late and since when, where no step comes although one is due; long before anything is done about it.
    An unknown state is of whoever asks, where the answer is not understood.
    """

    job: str
    state: Literal["running", "stopping", "ended", "unknown"]
    policy: ShownPolicy
    attempt: int
    world_size: int
    run_dir: str
    started_s: float
    nodes: tuple[str, ...] = ()
    incidents: int = 0
    lost_records: int = 0
    exit_code: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    standstill: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderAnswer:
    """What became of a request; `text` says why not, or what happens now."""

    accepted: bool
    text: str
