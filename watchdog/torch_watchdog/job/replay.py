"""A recorded run judged again: the reports of its nodes, at the times at which they were made, through a new Job.

Pure: reports in, incidents out. Nobody is there to take orders: what is found is all that comes of it. Only what steps and GPUs show is judged: how ranks
ended followed from what they were told then (a bad batch, an order, the launcher's signal), and by itself looks like failures that never were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch_watchdog.job.events import AppendEvent, Event, NodeJoined, NodeLeft, ReportCame, Tick
from torch_watchdog.job.job import Job
from torch_watchdog.rules.xid import XidCode
from torch_watchdog_proto import messages as m

__all__ = ["judged_again"]

_MOST_TICKS = 3600  # of one silence: a longer one changes nothing more


def judged_again(
    reports: Iterable[tuple[str, m.NodeReport]], *, codes: Mapping[int, XidCode], changes: Mapping[str, Mapping[str, Any]]
) -> tuple[tuple[Mapping[str, Any], ...], str | None]:
    """The incidents of a run, with these thresholds; and why the rules ended before the run did, where they did: then there may be more to find.

    `reports`: node and report, in the order in which they came.
    """
    again: _Again | None = None
    for node, report in reports:
        hello = _hello(node, changes)
        again = again or _Again(Job(hello, started_s=report.time_ns / 1e9, codes=codes), report.time_ns / 1e9)
        if node not in again.job.nodes:
            again.handle(NodeJoined(hello=hello))
        again.pass_time(report.time_ns / 1e9)
        again.handle(ReportCame(node=node, report=replace(report, events=())))
    if again is None:
        return (), None
    for node in again.job.nodes:
        again.handle(NodeLeft(node=node, goodbye=m.NodeGoodbye(exit_code=0)))
    return again.job.incidents, again.failure


class _Again:
    """A job and its clock."""

    def __init__(self, job: Job, now: float) -> None:
        self.job, self._now = job, now
        self.failure: str | None = None

    def handle(self, event: Event) -> None:
        for effect in self.job.handle(event, now=self._now):
            if isinstance(effect, AppendEvent) and effect.event["kind"] == "rules.failed":
                self.failure = effect.event["text"]

    def pass_time(self, until: float) -> None:
        """As a daemon does, a second a step; never back."""
        for _ in range(_MOST_TICKS):
            if self._now + 1.0 >= until:
                break
            self._now += 1.0
            self.handle(Tick())
        self._now = max(self._now, until)


def _hello(node: str, changes: Mapping[str, Mapping[str, Any]]) -> m.NodeHello:
    return m.NodeHello(job="replay", node=node, version="", policy="observe", command=(), run_dir="", session="replay", rules=changes)
