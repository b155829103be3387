"""What a node process is told at its start, and what it hands back at its end.

Owns two dataclasses; knows nothing of sockets, rings or the environment: the launcher fills them in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_watchdog_proto.messages import Policy

__all__ = ["JobOutcome", "NodeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One launch on one node. `daemon` is `unix:PATH` or `HOST:PORT`; `session` is random per launch and the same on all its nodes.

    `token` is asked before each connection, because a daemon that was started again has another; None: there is none that may be trusted. `authority`: the
    PEM of who signed the certificate of a daemon on another machine; None: both make theirs from the token.

    `runtime_dir` (0700, on a local disk) gets `control.sock`; `ring_dir` is where ranks put their `A-R-PID.ring` files.
    """

    job: str
    node: str
    session: str
    policy: Policy
    command: tuple[str, ...]
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_skips: int | None = None
    run_dir: Path
    runtime_dir: Path
    ring_dir: Path
    daemon: str
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    token: Callable[[], str | None] = str
    authority: bytes | None = None
    poll_interval_s: float = 0.2
    gpu_interval_s: float = 1.0
    max_unacked_bytes: int = 32 << 20
    max_backoff_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How the job ended. `exit_code` None: the wrapped command's own code stands. `lines` are for the terminal, without the prefix.

    `told`: the daemon has said so, and `incidents` are all that it found; else `unjudged` is what ranks of this node have said or come to.
    `sealed`: the checkpoint that they have left behind, as theirs.
    """

    exit_code: int | None
    incidents: tuple[Mapping[str, Any], ...] = ()
    lines: tuple[str, ...] = ()
    told: bool = False
    unjudged: tuple[str, ...] = ()
    sealed: Mapping[str, Any] | None = None
