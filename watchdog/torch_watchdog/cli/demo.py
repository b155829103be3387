"""`watchdog demo`: a real two-rank training with one broken sample, from the stop to the end of the resumed run, in under a minute."""

from __future__ import annotations

import click

from torch_watchdog.demonstration import run_demo

__all__ = ["command"]


@click.command("demo", short_help="A bad sample: stopped, named, saved, resumed.")
@click.option("--keep", is_flag=True, help="Leave the run directories to look at, and say where they are.")
@click.pass_context
def command(context: click.Context, /, keep: bool) -> None:
    """Train with a planted bad sample: stopped, named, saved, resumed."""
    if not run_demo(keep=keep):
        context.exit(1)
