"""`watchdog checkpoint JOB`: a checkpoint without a stop."""

from __future__ import annotations

import click

from torch_watchdog.cli.orders import ask, order_options

__all__ = ["command"]


@click.command("checkpoint", short_help="Ask a running job for a checkpoint.")
@order_options
@click.pass_context
def command(context: click.Context, /, job: str, reason: str, wait: bool, as_json: bool, **_: object) -> None:
    """Ask a running job for a checkpoint; it goes on training."""
    ask(context, job, "order.checkpoint", reason=reason, wait=wait, as_json=as_json)
