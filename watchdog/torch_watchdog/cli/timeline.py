"""`watchdog timeline [JOB] [JOB2]`: what every rank did, step by step; as text, for other tools, or two jobs side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import line_width, new_file, print_json, print_last_words, print_lines, print_text
from torch_watchdog.cli.source import JobLook, find_job
from torch_watchdog.config import LaunchConfig
from torch_watchdog.errors import UnknownRankError
from torch_watchdog.report.compare import comparison
from torch_watchdog.report.history import JobHistory
from torch_watchdog.report.perfetto import thinning, trace_events, trace_metadata
from torch_watchdog.report.steps import as_json as track_as_json
from torch_watchdog.report.steps import tracks
from torch_watchdog.report.text import render_comparison, render_timeline

__all__ = ["command"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("timeline", short_help="Show every rank, step by step.")
@click.argument("job", required=False)
@click.argument("other", required=False)
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write a page that needs no server and no network.")
@click.option("--perfetto", type=_FILE, metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
@click.option("--parquet", type=_FILE, metavar="FILE", help="Write a table, one row a rank and step (needs pyarrow).")
@look_options
@json_option
@click.pass_context
def command(
    context: click.Context, /, job: str | None, other: str | None, rank: int | None, as_json: bool, html: Path | None,
    perfetto: Path | None, parquet: Path | None, **_: object,
) -> None:  # fmt: skip
    """Show the steps of every rank, and where it went wrong (the newest job where none is named).

    \b
    JOB is a name, a run directory or the number of a Slurm job;
    JOB@1 is its attempt 1, the first restart of the launcher (the first start
    is 0). With two, show what differs between them.
    """
    config = settings(context)
    look, history = _history(job, rank, config)
    files = {_write_html: html, _write_perfetto: perfetto, _write_parquet: parquet}
    if other is not None:
        if any(files.values()):
            raise click.UsageError("two jobs are compared as text or with --json, not in a file")
        _compare(history, _history(other, rank, config)[1], as_json)
    elif any(files.values()):
        for write, path in files.items():
            if path is not None:
                print(f"{path}: {write(history, path)}")
    elif as_json:
        print_json({"job": history.name, "ranks": [track_as_json(track) for track in history.tracks], "incidents": list(history.incidents)})
    else:
        if history.scan:
            print_text(f"{history.scan}. Its training steps, by which it learned:")
        print_lines(render_timeline(history.record, history.tracks, history.incidents, width=line_width()))
        print_last_words(look, told=("who", "what", "more"))


def _history(wanted: str | None, rank: int | None, config: LaunchConfig) -> tuple[JobLook, JobHistory]:
    """`JOB@2` is the attempt 2 of a job: no job's name has an @."""
    name, attempt = wanted, None
    if wanted is not None and "@" in wanted and wanted.rpartition("@")[2].isdecimal():
        name, _, number = wanted.rpartition("@")
        attempt = int(number)
    look = find_job(name, directory=config.directory, daemon=config.daemon)
    history = look.history(rank)
    if rank is not None and not history.tracks:
        raise UnknownRankError(look.name, rank, tuple(track.rank for track in tracks(look.blocks(None))))
    if attempt is None:
        return look, history
    if attempt not in history.attempts:
        raise click.UsageError(
            f"job {look.name} has no steps of an attempt {attempt}: {', '.join(map(str, history.attempts)) or 'none'} reported"
        )
    return look, replace(history.of_attempt(attempt), name=f"{look.name}@{attempt}")


def _compare(first: JobHistory, second: JobHistory, as_json: bool) -> None:
    found = comparison(first, second)
    if as_json:
        print_json(found)
    else:
        print_lines(render_comparison(found))


def _write_perfetto(history: JobHistory, path: Path) -> str:
    """Event by event: a trace can be larger than what a laptop holds twice."""
    kept = thinning(history)
    with new_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(trace_metadata(history, kept))},"traceEvents":[\n')
        for number, event in enumerate(trace_events(history, kept)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":"), allow_nan=False))
        file.write("\n]}\n")
    return f"{kept.words}; open it at ui.perfetto.dev or in chrome://tracing"


def _write_parquet(history: JobHistory, path: Path) -> str:
    from torch_watchdog.report.parquet import write_parquet

    with new_file(path) as partial:
        return f"{write_parquet(history, partial)} rows, one a rank and step"


def _write_html(history: JobHistory, path: Path) -> str:
    from torch_watchdog.report.page import timeline_page

    with new_file(path) as partial:
        size = partial.write_bytes(timeline_page(history).encode("utf-8", "replace"))
    return f"{size / 1000:.0f} kB, opens without a network"
