"""`watchdog timeline [JOB]`: what every rank did, step by step."""

from __future__ import annotations

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import print_json, print_last_words, print_lines
from torch_watchdog.cli.source import find_job
from torch_watchdog.errors import UnknownRankError
from torch_watchdog.report.steps import as_json as track_as_json
from torch_watchdog.report.steps import tracks
from torch_watchdog.report.text import render_timeline

__all__ = ["command"]


@click.command("timeline", short_help="Show every rank, step by step.")
@click.argument("job", required=False)
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank.")
@look_options
@json_option
@click.pass_context
def command(context: click.Context, /, job: str | None, rank: int | None, as_json: bool, **_: object) -> None:
    """Show the steps of every rank, and where it went wrong (the newest job where none is named)."""
    config = settings(context)
    look = find_job(job, directory=config.directory, daemon=config.daemon)
    found, incidents, record = tracks(look.blocks(rank)), look.incidents(), look.record()
    if rank is not None and not found:
        raise UnknownRankError(look.name, rank, tuple(track.rank for track in tracks(look.blocks(None))))
    if as_json:
        print_json({"job": look.name, "ranks": [track_as_json(track) for track in found], "incidents": list(incidents)})
    else:
        print_lines(render_timeline(record, found, incidents))
        print_last_words(look)
