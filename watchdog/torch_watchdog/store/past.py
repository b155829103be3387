"""Jobs that ended before a daemon began, by the run directories that it writes to: for its pages, to look at.

Owns what counts as such a job, and the bound: the newest MAX_JOBS folders are told of, of each only small files and the newest steps are read. Never writes.
Everything here reads a disk: call it in another thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch_watchdog.errors import WatchdogError
from torch_watchdog.job.incident import is_order
from torch_watchdog.job.ranks import RankState
from torch_watchdog.launch.survivors import Survivors, UnansweredStatus, survivors
from torch_watchdog.scan.record import incidents_told, record_told
from torch_watchdog.scan.results import is_scan, read_results
from torch_watchdog.store.read import epoch_s, read_events, read_incidents, read_job, read_newest_blocks
from torch_watchdog.store.run_directory import FileVersion, RunDirectory, file_version
from torch_watchdog_proto.envelopes import JobStatus, RankStatus

__all__ = ["MAX_JOBS", "Known", "PastJob", "began_s", "exit_code_of", "past_job", "past_jobs", "status_of"]

_Version: TypeAlias = tuple[FileVersion | None, ...]  # of the files that a status is made of
Known: TypeAlias = dict[str, tuple[_Version, JobStatus]]  # what an earlier look has found

MAX_JOBS = 200
_AT_REST_S = 120.0  # a job without an end whose record has grown since may belong to another daemon
_MAX_EVENTS_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """`record` is its launch's job.json where that lies here, else empty; `run_dir` is here, that of `status` is the launch's own. `left`: what lives on of
    a launch whose record tells no end. `bad_samples` that a scan has found, None where it is none.
    """

    run_dir: Path
    status: JobStatus
    incidents: Sequence[Mapping[str, Any]]
    record: Mapping[str, Any]
    left: Survivors | None = None
    bad_samples: Sequence[Mapping[str, Any]] | None = None


def past_jobs(runs_dir: Path, *, but: Collection[str], now_s: float, known: Known) -> tuple[list[JobStatus], int]:
    """Newest first, without their ranks; and how many older folders are left out. `known` is brought up to date, for the next look."""
    changed = sorted(_changed(runs_dir, but), reverse=True)
    names = [name for _, name in changed[:MAX_JOBS]]
    for gone in known.keys() - set(names):
        known.pop(gone, None)
    found = [status for name in names if (status := _status_if_read(runs_dir / name, now_s, known)) is not None]
    return sorted(found, key=lambda status: status.started_s, reverse=True), max(0, len(changed) - MAX_JOBS)


def past_job(runs_dir: Path, name: str, *, now_s: float) -> PastJob | None:
    """With the ranks of its newest attempt, as their newest steps left them. None where there is no such job, or one that has not ended."""
    if "/" in name or name.startswith("."):
        return None
    root = runs_dir / name
    job = _ended_if_read(root, now_s)
    if job is None:
        return None
    ranks = _ranks(root, next(iter(job.status.nodes), ""), job.left)
    return replace(job, status=replace(job.status, ranks=ranks))


def _changed(runs_dir: Path, but: Collection[str]) -> list[tuple[float, str]]:
    found = []
    try:
        with os.scandir(runs_dir) as folders:
            for folder in folders:
                if folder.name not in but:
                    found += _when_changed(Path(folder.path))
    except OSError:
        return found
    return found


def _when_changed(root: Path) -> list[tuple[float, str]]:
    """Nothing where no daemon has kept a record there, or it is not for us to see, or the folder has a name that no page could show."""
    try:
        root.name.encode()
        known = RunDirectory(root).events_file.stat()
        return [(known.st_mtime, root.name)] if stat.S_ISREG(known.st_mode) else []
    except (OSError, UnicodeEncodeError):
        return []


def _status_if_read(root: Path, now_s: float, known: Known) -> JobStatus | None:
    version = _version(root)  # before it is read: what is written meanwhile is read again
    before = known.get(root.name)
    if before is not None and before[0] == version:
        return before[1]
    job = _ended_if_read(root, now_s)
    if job is None:
        return None
    if job.left is None or job.left.has_ended:  # what lives on ends without a change to its files
        known[root.name] = version, job.status
    return job.status


def _ended_if_read(root: Path, now_s: float) -> PastJob | None:
    """None of what holds something else than a daemon writes, or cannot be a folder's name: one odd folder must not take all the others off the page."""
    try:
        return _ended(root, now_s) if RunDirectory(root).events_file.is_file() else None
    except (OSError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def _version(root: Path) -> _Version:
    """Whatever changes an incident is in events.jsonl, too."""
    return tuple(map(file_version, (RunDirectory(root).events_file, RunDirectory(root).job_file)))


def _ended(root: Path, now_s: float) -> PastJob | None:
    try:
        record = record_told(root, read_job(root))
    except WatchdogError:
        record = {}  # of a launch on another machine
    file = RunDirectory(root).events_file
    try:
        size, changed_s = file.stat().st_size, file.stat().st_mtime
    except OSError:
        return None
    events = read_events(root) if size <= _MAX_EVENTS_BYTES else ()
    left = any(event.get("kind") == "node.left" for event in events)
    if not record.get("ended") and not left and now_s - changed_s < _AT_REST_S:
        return None
    incidents, bad = incidents_told(root, read_incidents(root)), read_results(root).bad if is_scan(root) else None
    silent = survivors(record, events=events) if record and record.get("exit_code") is None and not left else None
    status = status_of(root, record, events, incidents, silent)
    if bad is not None:
        status = replace(status, incidents=len(bad))  # as `watchdog jobs` counts them
    return PastJob(run_dir=root, record=record, incidents=incidents, status=status, left=silent, bad_samples=bad)


def status_of(
    root: Path,
    record: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
    left: Survivors | None = None,
) -> JobStatus:
    """Of a job that is over but for what is `left` of it, without its ranks. `record` is empty where the launch's own job.json is on another machine."""
    ranks = {event.get("rank") for event in events if event.get("kind") == "rank.connected"}
    joined = [event for event in events if event.get("kind") == "node.joined"]
    run_dir = str(root) if record else next((str(event["run_dir"]) for event in joined if event.get("run_dir")), str(root))
    known: dict[str, Any] = {
        "job": root.name, "policy": record.get("policy") or "stop", "run_dir": run_dir,
        "attempt": max((int(event.get("attempt") or 0) for event in events), default=0), "world_size": record.get("world_size") or len(ranks),
        "started_s": epoch_s(record.get("started")) or began_s(events),
        "nodes": tuple(sorted({str(event["node"]) for event in joined if event.get("node")})),
        "incidents": sum(not is_order(found) for found in incidents), "exit_code": exit_code_of(record, events, incidents),
    }  # fmt: skip
    return JobStatus(state="ended", **known) if left is None else UnansweredStatus.of(left, **known)


def began_s(events: Iterable[Mapping[str, Any]]) -> float:
    """By its first line; 0 where there is none."""
    return epoch_s(next((event.get("time") for event in events), None))


def exit_code_of(record: Mapping[str, Any], events: Sequence[Mapping[str, Any]], incidents: Sequence[Mapping[str, Any]]) -> int | None:
    """The launch's own word for it, else that of a stop of ours, else the first node's; None where nobody has told."""
    ours = [(one.get("action") or {}).get("exit_code") for one in incidents]
    nodes = [event.get("exit_code") for event in events if event.get("kind") == "node.left"]
    return next((code for code in (record.get("exit_code"), *ours, *nodes) if isinstance(code, int)), None)


def _ranks(root: Path, node: str, left: Survivors | None) -> tuple[RankStatus, ...]:
    blocks = read_newest_blocks(root, None)
    newest = max((block.attempt for block in blocks), default=0)
    states: dict[int, RankState] = {}
    for block in blocks:
        if block.attempt == newest:
            states.setdefault(block.rank, RankState(rank=block.rank, node=node, pid=block.pid)).record(block, 0.0)
    for rank, state in states.items():
        if left is None or rank not in left.ranks:
            state.gone()
        elif left.failed:
            state.phase = "end"
    return tuple(states[rank].status() for rank in sorted(states))
