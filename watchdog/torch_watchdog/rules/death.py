"""rank.died and rank.exception: which rank failed first, in the order in which its node saw it.

Pure: ends of ranks in, the first failure with its words out. A rank that ends because a peer's connection broke is a victim, however early its end
was seen.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Failure", "Verdict", "first_failure", "judge"]

PATIENCE_S = 3.0  # from the first failure on, for those whose cause is nearer to the root

# Words of a process whose peer is gone or silent: gloo, NCCL, c10d's store, sockets.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|timed out waiting|socket timeout|"
    r"communicator was aborted|remote process exited|DistNetworkError|DistStoreError|recvValue failed|failed to recv|"
    r"watchdog caught collective operation timeout|wait timeout|waiting for clients",
    re.IGNORECASE,
)
_ASKED_TO_END = frozenset({signals.SIGTERM, signals.SIGINT, signals.SIGHUP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's end with a status that is not 0. `text` is its last exception, in one line, where it had the time to leave one."""

    rank: int
    node: str
    pid: int
    order: int
    exit_code: int | None
    signal: int | None
    step: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the first failure is called, and the sentences about it."""

    kind: Literal["rank.died", "rank.exception"]
    severity: Literal["warning", "critical"]
    summary: str
    cause: str
    fix: str


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The first by its node's order of events that does not blame a peer; where all do, the first of all."""
    ordered = sorted(failures, key=lambda failure: failure.order)
    own = [failure for failure in ordered if not _PEER_IS_GONE.search(failure.text) and not _was_asked_to_end(failure)]
    return next(iter(own or ordered), None)


def judge(first: Failure) -> Verdict:
    """The kind and the words for the first failure."""
    where = f"rank {first.rank}" + ("" if first.step is None else f", after step {first.step}")
    if first.signal is not None:
        return _died(first, where)
    status = "ended" if first.exit_code is None else f"ended with exit code {first.exit_code}"
    return Verdict(
        kind="rank.exception",
        severity="critical",
        summary=f"{where}: {first.text or status}",
        cause=f"the rank {status}" + (f" after {first.text}" if first.text else "; it left no exception"),
        fix=f"read the end of logs/rank-{first.rank}.log; the other ranks' errors follow from this one",
    )


def _died(first: Failure, where: str) -> Verdict:
    name = _signal_name(first.signal)
    if _was_asked_to_end(first):
        return Verdict(
            kind="rank.died",
            severity="warning",
            summary=f"{where}: ended by {name} from outside",
            cause=f"somebody sent {name}: the launcher, a scheduler or a person; no rank failed before it",
            fix="nothing in the training: look at who stopped the job",
        )
    return Verdict(
        kind="rank.died",
        severity="critical",
        summary=f"{where}: killed by {name}" + (f", after {first.text}" if first.text else ""),
        cause=f"the process was ended by {name}" + (_SIGNAL_MEANINGS.get(first.signal or 0, "")),
        fix=f"read the end of logs/rank-{first.rank}.log, and `dmesg` on {first.node} for the kernel's reason",
    )


_SIGNAL_MEANINGS: dict[int, str] = {
    signals.SIGKILL: ": often the kernel or the container for want of memory, else a person or a scheduler",
    signals.SIGSEGV: ": a fault in native code",
    signals.SIGBUS: ": a file in shared memory or a mapped file was cut short or could not grow",
    signals.SIGABRT: ": native code gave up, as after a device-side assertion or by the NCCL watchdog",
}


def _was_asked_to_end(failure: Failure) -> bool:
    return failure.signal in _ASKED_TO_END


def _signal_name(number: int | None) -> str:
    try:
        return signals.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
