"""`watchdog ack INCIDENT`: this one is mine. It is not told to anybody else, and not again."""

from __future__ import annotations

import os

import click

from torch_watchdog.cli.alert import daemon_of
from torch_watchdog.cli.options import look_options, settings
from torch_watchdog.cli.source import find_job
from torch_watchdog.daemon.client import client_of
from torch_watchdog.errors import DaemonUnreachableError, OrderRefusedError
from torch_watchdog.user import caller

__all__ = ["command"]


@click.command("ack", short_help="Say that an incident is yours.")
@click.argument("incident", metavar="JOB/ID")
@look_options
@click.pass_context
def command(context: click.Context, /, incident: str, **_: object) -> None:
    """Say that an incident is yours. Its alert names it as JOB/ID, `watchdog incidents JOB` has the ids; whoever would be told next is not."""
    job, number = incident.partition("/")[::2]
    if not job or not number:
        raise click.UsageError(
            f"{incident!r} is no JOB/ID: the first incident of job train is train/1 (`watchdog incidents train` lists them)"
        )
    known = settings(context)
    try:
        with client_of(daemon_of(known, job), os.environ) as client:
            answer = client.acknowledge(incident, by=caller())
    except DaemonUnreachableError:
        look = find_job(job, directory=known.directory, daemon=known.daemon)
        if look.record().get("exit_code") is None:
            raise
        raise OrderRefusedError(job, "it has ended, and nobody is told of its incidents any more") from None
    if not answer.accepted:
        raise OrderRefusedError(job, answer.text)
    click.echo(answer.text)
