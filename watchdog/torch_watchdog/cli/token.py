"""`watchdog token`: tokens of `watchdog serve --tokens FILE`, each with a role and jobs. The file keeps digests: a token is shown once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import click

from torch_watchdog.cli.options import json_option
from torch_watchdog.cli.output import moment, print_json, print_table
from torch_watchdog.daemon.grants import OWNER_NAME, RoleName, TokenEntry, new_entry, read_tokens, write_tokens
from torch_watchdog.errors import ConfigError

__all__ = ["command"]

_DAY_S, _HOUR_S = 86_400.0, 3600.0


def _file(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--tokens", "path", type=click.Path(path_type=Path), required=True, envvar="TORCH_WATCHDOG_TOKENS", metavar="FILE")(
        command
    )


@click.group("token", short_help="Give, rotate and take away tokens of a daemon.")
def command() -> None:
    """Tokens of a daemon (`watchdog serve --tokens FILE`). A running daemon sees changes of the file at once."""


@command.command("add", short_help="A new token.")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(get_args(RoleName)),
    required=True,
    help="agent: launches report, and with --job see those jobs; viewer: looks; operator: looks and orders.",
)
@click.option(
    "--job", "jobs", multiple=True, metavar="PATTERN", help="Only for these jobs, as `team-a-*`, and their requeues (default: all)."
)
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), metavar="DAYS", help="Ends after so many days (default: when it is removed)."
)
@_file
def add(name: str, role: str, jobs: Sequence[str], days: float | None, path: Path) -> None:
    """Make a token for NAME and print it: it cannot be shown again."""
    if name == OWNER_NAME:
        raise ConfigError("NAME", f"{name!r} stands for the daemon's own token in the audit log: call this one otherwise")
    entries = read_tokens(path) if path.exists() else ()
    if any(entry.name == name for entry in entries):
        raise ConfigError(str(path), f"there is a token {name!r} already: `watchdog token rotate {name}` makes another")
    token, entry = new_entry(name, cast("RoleName", role), jobs, None if days is None else time.time() + days * _DAY_S)
    write_tokens(path, (*entries, entry))
    click.echo(token)


@command.command("rotate", short_help="Another token in place of one.")
@click.argument("name")
@click.option(
    "--keep",
    "hours",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="How long the old one still works.",
)
@_file
def rotate(name: str, hours: float, path: Path) -> None:
    """Make another token for NAME, with the same role and jobs, and print it."""
    entries, ends_s = read_tokens(path), time.time() + hours * _HOUR_S
    old = _of(name, entries, path)[-1]
    token, entry = new_entry(name, old.role, old.jobs, old.until_s)
    kept = [replace(one, until_s=min(ends_s, one.until_s or ends_s)) if one.name == name else one for one in entries]
    write_tokens(path, (*kept, entry))
    click.echo(token)


@command.command("remove", short_help="Take a token away.")
@click.argument("name")
@_file
def remove(name: str, path: Path) -> None:
    """Take every token of NAME away: its next call is refused."""
    entries = read_tokens(path)
    gone = _of(name, entries, path)
    write_tokens(path, tuple(entry for entry in entries if entry not in gone))
    click.echo(f"{len(gone)} tokens of {name} are gone")


@command.command("list", short_help="Names, roles and jobs.")
@_file
@json_option
def list_tokens(path: Path, as_json: bool) -> None:
    """List what the file grants."""
    if as_json:
        print_json(
            {"tokens": [{"name": one.name, "role": one.role, "jobs": one.jobs, "until_s": one.until_s} for one in read_tokens(path)]}
        )
        return
    rows = [(one.name, one.role, " ".join(one.jobs), _until(one.until_s)) for one in read_tokens(path)]
    print_table(("name", "role", "jobs", "until"), rows, empty="no tokens")


def _of(name: str, entries: Sequence[TokenEntry], path: Path) -> list[TokenEntry]:
    found = [entry for entry in entries if entry.name == name]
    if not found:
        raise ConfigError(
            str(path), f"there is no token {name!r}; known are {', '.join(sorted({entry.name for entry in entries})) or 'none'}"
        )
    return found


def _until(until_s: float | None) -> str:
    return "no end" if until_s is None else moment(until_s)
