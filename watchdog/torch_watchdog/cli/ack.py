"""`watchdog ack INCIDENT`: this one is mine. It is not told to anybody else, and not again."""

from __future__ import annotations

import os

import click

from torch_watchdog.cli.alert import daemon_of
from torch_watchdog.cli.options import look_options, settings
from torch_watchdog.cli.source import find_job, has_own_daemon
from torch_watchdog.daemon.client import client_of
from torch_watchdog.errors import DaemonUnreachableError, OrderRefusedError
from torch_watchdog.user import caller

__all__ = ["command"]


@click.command("ack", short_help="Say that an incident is yours.")
@click.argument("incident", metavar="JOB/ID")
@look_options
@click.pass_context
def command(context: click.Context, /, incident: str, **_: object) -> None:
    """Say that an incident is yours. Its alert names it as JOB/ID, `watchdog incidents JOB` has the ids; whoever would be told next is not.

    Of a launch that has ended, with its own daemon, nobody is told more: it says so, and ends well. A `watchdog serve` goes on, and takes it.
    """
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
        if not has_own_daemon(look) or look.record().get("exit_code") is None:
            raise
        if not any(str(found.get("id")) == number for found in look.incidents()):
            raise OrderRefusedError(job, f"it has no incident {number[:40]!r} (`watchdog incidents {job}` lists them)") from None
        click.echo(_nobody_left(incident, look.name))
        return
    if not answer.accepted:
        raise OrderRefusedError(job, answer.text)
    click.echo(answer.text)


def _nobody_left(incident: str, job: str) -> str:
    """The launch's own daemon has ended with it, and has told all that it will ever tell: whoever is called has nothing to do here."""
    return (
        f"{incident}: the launch of {job} has ended and sends no more alerts, so there is nothing to acknowledge here. What it left open is "
        "acknowledged where it arrived (the pager, Alertmanager, the chat), and is resolved there once a run of the same --job name trains"
    )
