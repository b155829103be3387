"""`watchdog serve`: a daemon for many jobs, on this machine's loopback."""

from __future__ import annotations

import os
import signal

import click

from torch_watchdog.cli.options import settings
from torch_watchdog.launch.say import say

__all__ = ["command"]

DEFAULT_PORT = 9470


@click.command("serve")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, metavar="PORT", help="0: any free port.")
@click.option("--dir", metavar="DIR", help="Where the run directories are (default: watchdog_runs).")
@click.pass_context
def command(context: click.Context, /, port: int, **_: object) -> None:
    """Serve a daemon for many jobs until SIGTERM or Ctrl-C."""
    config = settings(context)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would print its own lines about a port in use, before our sentence
    from torch_watchdog.daemon.config import DaemonConfig
    from torch_watchdog.daemon.embedded import EmbeddedDaemon

    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the daemon's threads start, so that they leave both to us
    with EmbeddedDaemon(DaemonConfig(runs_dir=config.directory, listen=(f"127.0.0.1:{port}",))) as daemon:
        say(f"daemon at {daemon.addresses[0]}, runs in {config.directory}: launch with `watchdog --daemon {daemon.addresses[0]} ...`")
        number = signal.sigwait(ends)
        say(f"{signal.Signals(number).name}: flushing and closing")
