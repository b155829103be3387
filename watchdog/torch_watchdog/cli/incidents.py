"""`watchdog incidents [JOB]`: what went wrong, or was about to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import print_json, print_last_words, print_table
from torch_watchdog.cli.source import all_jobs, find_job
from torch_watchdog.config import LaunchConfig
from torch_watchdog.scan.results import is_scan, read_results
from torch_watchdog.scan.tell import COLUMNS, row

__all__ = ["command"]


@click.command("incidents", short_help="List a job's incidents.")
@click.argument("job", required=False)
@look_options
@json_option
@click.pass_context
def command(context: click.Context, /, job: str | None, as_json: bool, **_: object) -> None:
    """List a job's incidents (of the newest job where none is named)."""
    config = settings(context)
    look = find_job(job, directory=config.directory, daemon=config.daemon)
    found = look.incidents()
    if as_json:
        print_json({"job": look.name, "incidents": list(found)})
        return
    root = look.folder()
    bad = read_results(root).bad if root is not None and is_scan(root) else ()
    if bad:
        print_table(COLUMNS, [row(entry) for entry in bad], empty="")
    if found or not bad:
        rows = [_row(incident) for incident in found]
        print_table(
            ("id", "severity", "kind", "rank", "step", "summary"), rows, empty=f"job {look.name}: no incident{_of_others(job, config)}"
        )
    print_last_words(look, told=("who", "what", "others"))


def _of_others(job: str | None, config: LaunchConfig) -> str:
    """Where nobody has said which job is meant: the newest need not be the one that failed."""
    if job is not None or not any(one.incidents for one in all_jobs(directory=config.directory, daemon=config.daemon)):
        return ""
    return ", and it is the newest; an earlier job has some: `watchdog jobs` lists them, `watchdog incidents JOB` shows one's"


def _row(incident: Mapping[str, Any]) -> tuple[object, ...]:
    origin, step, attempt = incident.get("origin") or {}, incident.get("step"), incident.get("attempt")
    return (
        incident.get("id"),
        incident.get("severity"),
        incident.get("kind"),
        origin.get("rank"),
        step if step is None or not attempt else f"{step} of attempt {attempt}",
        incident.get("summary"),
    )
