"""`watchdog run -- CMD`, and every `watchdog CMD` that is none of our commands."""

from __future__ import annotations

from dataclasses import replace

import click

from torch_watchdog.cli.options import given_words, launch_options, settings
from torch_watchdog.errors import ConfigError
from torch_watchdog.launch.plain import become, become_for
from torch_watchdog.launch.say import say
from torch_watchdog_proto.loops import quiet_grpc

__all__ = ["command"]


@click.command("run", short_help="Launch CMD under the watchdog (explicit form).", context_settings={"allow_interspersed_args": False})
@launch_options
@click.option("--scan", is_flag=True, hidden=True)  # by `watchdog scan`
@click.option("--scan-after", hidden=True)
@click.option("--replay", hidden=True)  # by `watchdog replay`
@click.argument("words", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- CMD...")
@click.pass_context
def command(context: click.Context, /, words: tuple[str, ...], scan: bool, scan_after: str | None, replay: str | None, **_: object) -> None:
    """Launch CMD under the watchdog: the explicit form of `watchdog CMD...`."""
    try:
        config = replace(settings(context), scan=scan, scan_after=scan_after, replay=replay)
        if replay is not None:  # it fails on purpose: neither it nor a central daemon may call anybody for that
            config = replace(config, alerts=(), daemon="auto")
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a deleted folder, say
        become_for(error, words)
    if not config.enabled:
        say("switched off on this machine (/etc/torch-watchdog/config.toml): this runs unwatched")
        become(words)
    for line in config.overruled:
        say(line)
    try:
        with quiet_grpc():
            from torch_watchdog.launch.run import launch  # here, because it brings gRPC: a typing error must not wait for it
    except Exception as error:  # noqa: BLE001 - gRPC, or protobuf, is not there or of a version that does not fit
        become_for(error, words)
    launch(config, words, options=given_words(context))
