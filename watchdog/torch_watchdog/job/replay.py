"""A recorded run judged again: the reports of its nodes, at the times at which they were made, through a new Job.

Pure: reports in, incidents out. Nobody is there to take orders: what is found is all that comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch_watchdog.job.events import NodeJoined, NodeLeft, ReportCame, Tick
from torch_watchdog.job.job import Job
from torch_watchdog.rules.xid import XidCode
from torch_watchdog_proto import messages as m

__all__ = ["judged_again"]

_MOST_TICKS = 3600  # of one silence: a longer one changes nothing more


def judged_again(
    reports: Iterable[tuple[str, m.NodeReport]], *, codes: Mapping[int, XidCode], changes: Mapping[str, Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """The incidents of a run, with these thresholds. `reports`: node and report, in the order in which they came."""
    job: Job | None = None
    now = 0.0
    for node, report in reports:
        hello = _hello(node, changes)
        if job is None:
            now = report.time_ns / 1e9
            job = Job(hello, started_s=now, codes=codes)
        if node not in job.nodes:
            job.handle(NodeJoined(hello=hello), now=now)
        now = _pass_time(job, now, report.time_ns / 1e9)
        job.handle(ReportCame(node=node, report=report), now=now)
    if job is None:
        return ()
    for node in job.nodes:
        job.handle(NodeLeft(node=node, goodbye=m.NodeGoodbye(exit_code=0)), now=now)
    return job.incidents


def _hello(node: str, changes: Mapping[str, Mapping[str, Any]]) -> m.NodeHello:
    return m.NodeHello(job="replay", node=node, version="", policy="observe", command=(), run_dir="", session="replay", rules=changes)


def _pass_time(job: Job, now: float, until: float) -> float:
    """Lets time pass as a daemon does, a second a step; never back."""
    for _ in range(_MOST_TICKS):
        if now + 1.0 >= until:
            break
        now += 1.0
        job.handle(Tick(), now=now)
    return max(now, until)
