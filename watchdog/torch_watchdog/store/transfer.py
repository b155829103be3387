"""Run directories into the shared store, and back: how a daemon takes over a run, and what `watchdog store` does.

Owns what is brought: what a daemon wrote, never checkpoints, logs or what the launcher wrote. Bringing twice changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from torch_watchdog.store.database import Database
from torch_watchdog.store.job_files import JobFiles
from torch_watchdog.store.past import exit_code_of
from torch_watchdog.store.read import read_events, read_incidents, read_reports
from torch_watchdog.store.record import REPLACED, Kind, Record, event_record, json_record, report_record, stacks_record
from torch_watchdog.store.run_directory import RunDirectory, write_json
from torch_watchdog.store.shapes import NEWEST_JOB_VERSION
from torch_watchdog_proto.codec import MalformedMessageError, read_stored_report, stored_report

__all__ = ["bring_in", "bring_out", "local_records", "write_job_if_missing"]

_BATCH = 200


def bring_in(database: Database, run_dir: Path, *, has_newest: bool) -> int:
    """What the store lacks of this run. `has_newest`: the run directory's incidents and alerts are newer. Returns how many records.

    Raises StoreError, OSError.
    """
    there, batch, number = database.keys(run_dir.name), list[Record](), 0
    for record in local_records(run_dir):
        if (record.kind, record.key) not in there or (has_newest and record.kind in REPLACED):
            batch.append(record)
            number += 1
        if len(batch) >= _BATCH:
            database.write(batch)
            batch.clear()
    database.write(batch)
    return number


def bring_out(database: Database, run: str, run_dir: Path, *kinds: Kind) -> int:
    """What the run directory lacks of this run, and the newest words of its incidents; of these kinds only, where any is named.

    Returns how many records. Raises StoreError, OSError.
    """
    kept = () if kinds and REPLACED.issuperset(kinds) else local_records(run_dir)  # to read a run of weeks takes a while
    there = {(record.kind, record.key) for record in kept if record.kind not in REPLACED}
    files, number = JobFiles(run_dir), 0
    try:
        for record in database.records(run, *kinds):
            if (record.kind, record.key) not in there:
                _write(files, RunDirectory(run_dir), record)
                number += 1
    finally:
        files.close()
    return number


def write_job_if_missing(run_dir: Path) -> None:
    """job.json as far as the reports tell it. The launch wrote its own on its own machine, and that is not in a store. Raises OSError."""
    directory = RunDirectory(run_dir)
    if directory.job_file.is_file():
        return
    times_ns, ranks, session = list[int](), set[int](), ""
    for _, session, report in read_reports(run_dir):  # noqa: B007  the newest one's is kept
        times_ns.append(report.time_ns)
        ranks.update(report.steps.rank)
    began, ended = (_utc(time_ns) for time_ns in (min(times_ns), max(times_ns))) if times_ns else (None, None)
    job = {"schema_version": NEWEST_JOB_VERSION, "job": run_dir.name, "session": session, "started": began, "ended": ended}
    events = list(read_events(run_dir))
    ranks.update(int(event["rank"]) for event in events if event.get("kind") == "rank.connected" and event.get("rank") is not None)
    code = exit_code_of(job, events, read_incidents(run_dir))
    if code is not None:
        job |= {"exit_code": code, "exit_reason": "as its daemon was told"}
    write_json(directory.job_file, job | {"world_size": len(ranks) or None, "ranks_reported": len(ranks)})


def _utc(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local_records(run_dir: Path) -> Iterator[Record]:
    """What a run directory holds, as records. Nothing where there is none."""
    run, directory = run_dir.name, RunDirectory(run_dir)
    for node, session, report in read_reports(run_dir):
        yield report_record(run, node, report.seq, stored_report(node, session, report))
    yield from (event_record(run, event) for event in read_events(run_dir))
    for incident in read_incidents(run_dir):
        yield json_record(run, "incident", str(incident["id"]), incident)
        stacks = directory.incident(str(incident["id"])) / "stacks.txt"
        if stacks.is_file():
            yield stacks_record(run, str(incident["id"]), stacks.read_text(encoding="utf-8", errors="replace"))
    if directory.alerts_file.is_file():
        try:
            yield json_record(run, "alerts", "", json.loads(directory.alerts_file.read_text(encoding="utf-8")))
        except ValueError:
            pass  # half of a file is no alert: the next change writes it again


def _write(files: JobFiles, directory: RunDirectory, record: Record) -> None:
    content = record.content
    match record.kind:
        case "report":
            try:
                files.append_report(*read_stored_report(content))
            except MalformedMessageError:
                pass  # of a newer version: its neighbours may still be read
        case "event":
            files.append_event(json.loads(content))
        case "incident":
            files.write_incident(json.loads(content), None)
        case "stacks":
            files.write_stacks(record.key, content.decode("utf-8", "replace"))
        case "alerts":
            write_json(directory.alerts_file, json.loads(content))
