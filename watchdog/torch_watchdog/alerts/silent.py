"""Jobs whose nodes are gone without a goodbye: which of them must be told of, now.

Owns the two ways to be silent: a run that this daemon heard and hears no more, and one that an earlier daemon left running and that never came back.
Of the runs of one training only the newest counts. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch_watchdog.alerts.alert import JOB_SILENT, Alert
from torch_watchdog.alerts.text import typed

__all__ = ["Awaited", "Silent", "silence_alert", "silence_key"]

_MAX_NAMED_NODES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """A run that had not ended when this daemon came to tell of it."""

    job: str
    attempt: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """`silent` of the job's `nodes`. `was_left`: by an earlier daemon."""

    job: str
    training_job: str
    attempt: int
    nodes: int
    silent: Sequence[str]
    was_left: bool = False


def silence_key(training_job: str) -> str:
    """The same over all runs and attempts of a training: it is silent or it is not."""
    return hashlib.sha256(f"{training_job}\0{JOB_SILENT}".encode()).hexdigest()[:16]


def silence_alert(found: Silent, *, silent_s: float, now: float, page: str | None, runbook: str | None, asked: Sequence[str] = ()) -> Alert:
    named = ", ".join(found.silent[:_MAX_NAMED_NODES])
    named += f" and {len(found.silent) - _MAX_NAMED_NODES} more" if len(found.silent) > _MAX_NAMED_NODES else ""
    since = "since this daemon tells of it: it has ended, or died, while none did" if found.was_left else "and no goodbye"
    lines = (
        f"no word from {named} for {silent_s:.0f} s, {since}",
        "done: nothing: ranks train on without the daemon, if they are there",
        f"look: {typed('status', found.job, asked)}, then the scheduler: is the job there, are the nodes?",
        *((f"page: {page}",) if page else ()),
        *((f"help: {runbook}",) if runbook else ()),
    )
    return Alert(
        key=silence_key(found.training_job), training_job=found.training_job, job=found.job, attempt=found.attempt, incident="silent",
        kind=JOB_SILENT, severity="critical", title=f"{found.job}: {len(found.silent)} of {found.nodes} nodes silent", lines=lines, starts_s=now,
        page=page, runbook=runbook,
    )  # fmt: skip
