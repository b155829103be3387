"""What an alert is: an incident as the person on call sees it, and the key that it keeps.

Owns the vocabulary of this package. Pure: knows no receiver, clock or file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["Action", "Alert", "Delivery", "JOB_SILENT", "Severity", "alert_name", "key_of", "lineage_of"]

Severity: TypeAlias = Literal["warning", "critical"]
Action: TypeAlias = Literal["trigger", "acknowledge", "resolve"]
JOB_SILENT = "watchdog.job_silent"  # the one kind that is no incident's
_REQUEUED = re.compile(r"(.+)\.([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """`training_job` is the job's name without the number of its requeue, `job` and `incident` name what it is about now.

    `key` stays the same over attempts and requeues. `lines` are what a phone shows below the title. `resolved_by`: how it came to its end, in words.
    """

    key: str
    training_job: str
    job: str
    attempt: int
    incident: str
    kind: str
    severity: Severity
    title: str
    lines: tuple[str, ...]
    starts_s: float
    node: str | None = None
    rank: int | None = None
    page: str | None = None
    runbook: str | None = None
    resolved: bool = False
    resolved_by: str = ""
    acknowledged_by: str | None = None

    @property
    def name(self) -> str:
        """As `watchdog ack` takes it."""
        return f"{self.job}/{self.incident}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One thing to tell one receiver. `ends_s`: when a receiver that hears no more of it may forget it. A trigger of an alert that is resolved tells what
    was over before it could be told: its resolve follows.
    """

    receiver: str
    action: Action
    alert: Alert
    version: int
    ends_s: float
    again: bool = False  # this receiver has been told of this alert before
    is_last: bool = False  # this daemon ends and will say no more


def key_of(incident: Mapping[str, Any], training_job: str) -> str:
    """The same fault of the same training, whatever its attempt, its requeue's number, its rank and its step."""
    batch, bound = incident.get("batch") or {}, incident.get("bound") or {}
    sample = (batch.get("sample") or {}).get("dataset_index")
    parts = (training_job, incident["kind"], batch.get("key"), bound.get("module"), bound.get("op"), sample)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def lineage_of(job: str, is_run: Callable[[str], bool]) -> str:
    """`nightly` for its requeue `nightly.3`: a launch whose name is taken gets a number. Only where there was a run of the plain name."""
    found = _REQUEUED.fullmatch(job)
    return found[1] if found and int(found[2]) > 1 and is_run(found[1]) else job


def alert_name(kind: str) -> str:
    """`TrainingRankHang` for rank.hang."""
    return "Training" + "".join(word.capitalize() for word in re.split(r"[._]", kind))
