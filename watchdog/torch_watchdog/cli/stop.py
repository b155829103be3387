"""`watchdog stop JOB`: a clean stop with a checkpoint."""

from __future__ import annotations

import click

from torch_watchdog.cli.orders import ask, order_options

__all__ = ["command"]


@click.command("stop", short_help="Ask a running job for a clean stop.")
@order_options
@click.option("--cancel", is_flag=True, help="Take back the stop or checkpoint that is under way, while nothing is decided yet.")
@click.pass_context
def command(context: click.Context, /, job: str, reason: str, wait: bool, as_json: bool, cancel: bool, **_: object) -> None:
    """Ask a running job to stop cleanly: every rank after the same step, with a checkpoint."""
    if cancel:
        ask(context, job, "order.cancel", reason=reason, wait=False, as_json=as_json)
    else:
        ask(context, job, "order.stop", reason=reason, wait=wait, as_json=as_json)
