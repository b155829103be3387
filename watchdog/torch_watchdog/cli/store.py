"""`watchdog store`: run directories into a shared store, out of it again, and what is old away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from torch_watchdog.cli.options import settings
from torch_watchdog.errors import ConfigError, UnknownJobError
from torch_watchdog.store.database import Database, check_store_url
from torch_watchdog.store.retention import forget_old_files
from torch_watchdog.store.transfer import bring_in, bring_out, write_job_if_missing

__all__ = ["command", "open_store"]

_DAY_S = 86_400.0
_RUNS_S = 60.0  # a daemon says every few seconds which jobs it decides for: these are never old


def _store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    where = click.option("--dir", metavar="DIR", help="Where the run directories are (default: watchdog_runs).")
    url = click.option(
        "--store", "url", envvar="TORCH_WATCHDOG_STORE", metavar="URL", help="postgresql://USER@HOST/DATABASE or sqlite:////PATH."
    )
    return where(url(command))


@click.group("store", short_help="Bring runs into a shared store, out of it, and away.")
def command() -> None:
    """The shared store of several daemons (`watchdog serve --store`), and how long runs are kept."""


@command.command("export", short_help="Write run directories from the store.")
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@_store_options
@click.pass_context
def export(context: click.Context, /, jobs: tuple[str, ...], url: str | None, **_: object) -> None:
    """Write what the store has of these jobs (default: of all) into run directories below --dir, for every command that reads them."""
    folder, database = settings(context).directory, open_store(url)
    there = database.runs()
    if not there and not jobs:
        click.echo("the store has no run")
    for job in jobs or tuple(there):
        if job not in there:
            raise UnknownJobError(job, tuple(there))
        click.echo(f"{job}: {bring_out(database, job, folder / job)} records")
        write_job_if_missing(folder / job)


@command.command("import", short_help="Bring run directories into the store.")
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@_store_options
@click.pass_context
def import_runs(context: click.Context, /, jobs: tuple[str, ...], url: str | None, **_: object) -> None:
    """Bring run directories (default: all below --dir) into the store. What is there already stays as it is."""
    folder, database = settings(context).directory, open_store(url)
    found = jobs or tuple(sorted(path.name for path in folder.glob("[!.]*") if path.is_dir()))
    if not found:
        click.echo(f"no run in {folder}")
    for job in found:
        if not (folder / job).is_dir():
            raise UnknownJobError(job)
        number = bring_in(database, folder / job, has_newest=False)
        database.keep_run(job, time.time())
        click.echo(f"{job}: {number} records")


@command.command("prune", short_help="Remove the records of old runs.")
@click.option(
    "--older-than", "days", type=click.FloatRange(min=0), required=True, metavar="DAYS", help="Days since anything was written of them."
)
@_store_options
@click.pass_context
def prune(context: click.Context, /, days: float, url: str | None, **_: object) -> None:
    """Remove what daemons wrote of old runs: below --dir, and in --store where one is given. Checkpoints and logs stay."""
    before_s = time.time() - max(days * _DAY_S, _RUNS_S)
    from_files = tuple(forget_old_files(settings(context).directory, before_s, ()))
    from_store = open_store(url).forget_older(before_s, ()) if url else ()
    for job in from_files:
        click.echo(f"{job}: removed from its run directory")
    for job in from_store:
        click.echo(f"{job}: removed from the store")
    if not from_files and not from_store:
        click.echo(f"nothing is older than {days:g} days")


def open_store(url: str | None) -> Database:
    """Raises ConfigError, StoreError."""
    if not url:
        raise ConfigError("--store", "which store? Pass its URL, or set TORCH_WATCHDOG_STORE, which keeps a password off the command line")
    try:
        check_store_url(url)
    except ValueError as error:
        raise ConfigError("--store", str(error)) from None
    return Database.open(url)
