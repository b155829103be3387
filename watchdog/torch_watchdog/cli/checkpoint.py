"""`watchdog checkpoint JOB`: a checkpoint without a stop."""

from __future__ import annotations

import click

from torch_watchdog.cli.options import json_option, look_options
from torch_watchdog.cli.orders import ask

__all__ = ["command"]


@click.command("checkpoint")
@click.argument("job")
@click.option("--reason", default="", metavar="TEXT", help="Kept in the job's events.")
@look_options
@json_option
@click.pass_context
def command(context: click.Context, /, job: str, reason: str, as_json: bool, **_: object) -> None:
    """Ask a running job for a checkpoint; it goes on training."""
    ask(context, job, "order.checkpoint", reason=reason, as_json=as_json)
