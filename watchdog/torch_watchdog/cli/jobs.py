"""`watchdog jobs`: the jobs of a folder, or of a daemon."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import print_json, print_table
from torch_watchdog.cli.source import all_jobs
from torch_watchdog.scan.results import is_scan, read_results
from torch_watchdog_proto.envelopes import JobStatus

__all__ = ["command"]


@click.command("jobs")
@look_options
@json_option
@click.pass_context
def command(context: click.Context, /, as_json: bool, **_: object) -> None:
    """List the jobs, newest first."""
    config = settings(context)
    found = [_listed(job) for job in all_jobs(directory=config.directory, daemon=config.daemon)]
    if as_json:
        print_json({"jobs": found})
        return
    where = f"in {config.directory}" if config.daemon == "auto" else f"has reported to the daemon at {config.daemon} since it began"
    rows = [
        (
            job["job"],
            job["state"],
            _started(job["started_s"]),
            job["world_size"] or "",
            job["policy"],
            job["incidents"],
            "" if job["exit_code"] is None else job["exit_code"],
        )
        for job in found
    ]
    print_table(("job", "state", "started", "ranks", "policy", "incidents", "exit"), rows, empty=f"no job {where}")


def _listed(job: JobStatus) -> dict[str, Any]:
    """A scan is listed as one: with its bad samples for incidents, and the exit code that `watchdog scan` had."""
    run_dir, listed = Path(job.run_dir), dataclasses.asdict(job)
    if not is_scan(run_dir):
        return listed
    results = read_results(run_dir)
    code = results.exit_code(job.exit_code or 0) if job.state == "ended" else None
    return listed | {"policy": "scan", "incidents": len(results.bad), "exit_code": code}


def _started(started_s: float) -> str:
    return f"{datetime.fromtimestamp(started_s).astimezone():%Y-%m-%d %H:%M:%S}" if started_s else ""
