"""`watchdog stop JOB`: a clean stop with a checkpoint."""

from __future__ import annotations

import click

from torch_watchdog.cli.orders import ask, order_options

__all__ = ["command"]


@click.command("stop", short_help="Ask a running job for a clean stop.")
@order_options
@click.pass_context
def command(context: click.Context, /, job: str, reason: str, wait: bool, as_json: bool, **_: object) -> None:
    """Ask a running job to stop cleanly: every rank after the same step, with a checkpoint."""
    ask(context, job, "order.stop", reason=reason, wait=wait, as_json=as_json)
