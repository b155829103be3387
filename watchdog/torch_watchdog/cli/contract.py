"""`watchdog contract JOB`: what a rank has learned that every batch must satisfy, and what it could not learn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import print_facts, print_json, print_table
from torch_watchdog.cli.source import find_job
from torch_watchdog.launch.summary import allowed_range

__all__ = ["command"]

FIRST_COLUMNS = ("key", "expression", "bound", "op", "module", "source")  # what a person looks for; the rest follows as it was written


@click.command("contract", short_help="Show the bounds that batches are held to.")
@click.argument("job")
@click.option("--rank", type=click.IntRange(min=0), default=0, metavar="R", help="The rank that learned it (default: 0).")
@look_options
@json_option
@click.pass_context
def command(context: click.Context, /, job: str, rank: int, as_json: bool, **_: object) -> None:
    """Show the bounds that a job's batches are held to."""
    config = settings(context)
    found = find_job(job, directory=config.directory, daemon=config.daemon).contract(rank)
    if as_json:
        print_json(found)
    else:
        _print_sections(found)


def _print_sections(found: Mapping[str, Any]) -> None:
    """Single values as facts, then each list as a table under its name: whatever the rank has written is shown."""
    print_facts({name: value for name, value in found.items() if not isinstance(value, list)})
    for name, entries in found.items():
        if isinstance(entries, list):
            print(f"\n{name}")
            _print_entries(entries)


def _print_entries(entries: Sequence[Any]) -> None:
    rows = [entry if isinstance(entry, dict) else {"": entry} for entry in entries]
    found = dict.fromkeys(column for row in rows for column in row)
    columns = [*(name for name in FIRST_COLUMNS if name in found), *(name for name in found if name not in FIRST_COLUMNS)]
    print_table(columns, [[_cell(row.get(column)) for column in columns] for row in rows], empty="  none")


def _cell(value: Any) -> Any:
    if isinstance(value, dict) and "low" in value and "high" in value:
        return allowed_range(value)
    return json.dumps(value) if isinstance(value, list | dict) else value
