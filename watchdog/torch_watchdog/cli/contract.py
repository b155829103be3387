"""`watchdog contract [JOB]`: what a rank has learned that every batch must satisfy, and what it could not learn.

Owns the words of the two tables. What the rank wrote is shown whole by --json; the tables leave out what only a program needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import print_json, print_table, print_text
from torch_watchdog.cli.source import JobLook, find_job
from torch_watchdog.errors import WatchdogError
from torch_watchdog.launch.places import here
from torch_watchdog.phrases import as_typed
from torch_watchdog.report.bounds import must_be
from torch_watchdog_proto.names import spoken

__all__ = ["command"]

Row = Mapping[str, Any]
NOTHING_LEARNED: Mapping[str, Any] = {"traces": 0, "guarded": [], "opaque": []}
COLUMNS = {
    "tensor": "its name in the batch",
    "index": "how the program computes from it what it looks up; empty: the values as they are",
    "must be": "both ends are allowed, and so are the values that a loss ignores",
    "checked for": "the operation and the module that would fail",
    "line": "where that is called",
    "learned from": "the batch whose step taught it, or who declared it",
    "a bad batch": "held: before the step begins; unseen: unless the program itself reads the bad value first. confirmed: the step runs with every"
    " operation watched, and the bad one is refused",
}


@click.command("contract", short_help="Show the bounds that batches are held to.")
@click.argument("job", required=False)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    default=0,
    metavar="R",
    help="Show what this rank has learned (default: 0; others learn the same).",
)
@look_options
@json_option
@click.pass_context
def command(context: click.Context, /, job: str | None, rank: int, as_json: bool, **_: object) -> None:
    """Show the bounds that a job's batches are held to (the newest job where none is named)."""
    config = settings(context)
    look = find_job(job, directory=config.directory, daemon=config.daemon)
    found = _learned(look, rank)
    if as_json:
        print_json(found)
    elif not found.get("traces") and not found.get("guarded"):
        ended = look.status().state == "ended"
        print_text(
            f"job {look.name} ended before anything was learned"
            if ended
            else f"no contract yet: the first steps of job {look.name} are still being learned"
        )
    else:
        _print(found, f"rank {rank} of job {look.name}")


def _learned(look: JobLook, rank: int) -> Mapping[str, Any]:
    """A rank that is still in its first steps has written nothing."""
    try:
        return look.contract(rank)
    except WatchdogError:
        status = look.status()
        if status.state == "ended" or (status.ranks and all(known.rank != rank for known in status.ranks)):
            raise
        return NOTHING_LEARNED


def _print(found: Mapping[str, Any], who: str) -> None:
    guarded: Sequence[Row] = found.get("guarded") or ()
    opaque: Sequence[Row] = found.get("opaque") or ()
    print_text(f"Learned by {who} from {found.get('traces', '?')} traced steps; every batch is held to it before the model gets it.\n")
    print_table(tuple(COLUMNS), [_guarded(row) for row in guarded], empty="nothing is guarded")
    print_text(
        "\nNot covered: nothing is known in advance about what these get.\n" if opaque else "\nNothing that was met is left uncovered."
    )
    if opaque:
        print_table(("tensor", "index", "checked for", "line", "why not"), [_opaque(row) for row in opaque], empty="")
    print()
    width = max(map(len, COLUMNS))
    for name, meaning in COLUMNS.items():
        print_text(f"{name:<{width}}  {meaning}")


def _guarded(row: Row) -> tuple[object, ...]:
    acts = row.get("acts_alone")
    bad = "" if acts is None else "held" if acts else "held, unseen" if row.get("acts_unseen") else "confirmed"
    return spoken(row.get("key") or "") or "(a length)", _index(row), must_be(row), _consumer(row), _line(row), row.get("learned_from"), bad


def _opaque(row: Row) -> tuple[object, ...]:
    return spoken(row.get("key") or ""), _index(row), _consumer(row), _line(row), row.get("why")


def _index(row: Row) -> str:
    expression = row.get("expression") or ""
    return "" if expression == spoken(row.get("key") or "") else expression


def _consumer(row: Row) -> str:
    return f"{row.get('op')}" + (f" in {row['module']}" if row.get("module") else "")


def _line(row: Row) -> str:
    """From where the person stands; of an installed library without its folder of packages, which is half a terminal wide."""
    return re.sub(r"^.*/(?:site|dist)-packages/", "", as_typed(row.get("source") or "", here()))
