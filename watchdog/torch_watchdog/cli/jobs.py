"""`watchdog jobs`: the jobs of a folder, or of a daemon."""

from __future__ import annotations

from datetime import datetime

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import print_json, print_table
from torch_watchdog.cli.source import all_jobs, listed
from torch_watchdog.launch.say import say
from torch_watchdog.launch.survivors import state_told

__all__ = ["command"]


@click.command("jobs")
@look_options
@json_option
@click.pass_context
def command(context: click.Context, /, as_json: bool, **_: object) -> None:
    """List the jobs, newest first."""
    config = settings(context)
    known = all_jobs(directory=config.directory, daemon=config.daemon)
    found = [listed(job) for job in known]
    if as_json:
        print_json({"jobs": found})
        return
    where = f"in {config.directory}" if config.daemon == "auto" else f"is known to the daemon at {config.daemon}"
    rows = [
        (
            job["job"],
            state_told(status),
            _started(job["started_s"]),
            job["world_size"] or "",
            job["policy"],
            job["incidents"],
            "" if job["exit_code"] is None else job["exit_code"],
            job["resumed_from"],
        )
        for status, job in zip(known, found, strict=True)
    ]
    for job in found:
        if job.get("problem"):
            say(f"job {job['job']}: {job['problem']}")
    print_table(("job", "state", "started", "ranks", "policy", "incidents", "exit", "resumed from"), rows, empty=f"no job {where}")


def _started(started_s: float) -> str:
    return f"{datetime.fromtimestamp(started_s).astimezone():%Y-%m-%d %H:%M:%S}" if started_s else ""
