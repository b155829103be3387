"""`watchdog run -- CMD`, and every `watchdog CMD` that is none of our commands."""

from __future__ import annotations

import click

from torch_watchdog.cli.options import given_words, launch_options, settings

__all__ = ["command"]


@click.command("run", context_settings={"allow_interspersed_args": False})
@launch_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- CMD...")
@click.pass_context
def command(context: click.Context, /, words: tuple[str, ...], **_: object) -> None:
    """Launch CMD under the watchdog: the explicit form of `watchdog CMD...`."""
    config = settings(context)
    from torch_watchdog.launch.run import launch  # here, because it brings gRPC: a typing error must not wait for it

    launch(config, words, options=given_words(context))
