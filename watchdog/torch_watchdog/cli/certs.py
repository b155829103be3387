"""`watchdog certs`: a certificate authority of this site's own, and the certificate of a daemon, for ports that leave the machine."""

from __future__ import annotations

import re
from pathlib import Path

import click

from torch_watchdog.certificates import make_certificates

__all__ = ["command"]


@click.command("certs", short_help="Make a CA and a daemon's certificate.")
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("certs"), show_default=True, metavar="DIR")
@click.option("--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="How long the daemon's certificate holds.")
def command(hosts: tuple[str, ...], out: Path, days: int) -> None:
    """Make DIR/daemon.crt and DIR/daemon.key for a daemon that is called by these names or addresses, signed by DIR/ca.crt (made where it is not there).

    Give ca.crt to whoever calls (TORCH_WATCHDOG_CA_FILE), keep ca.key off the daemon's machine.
    """
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9*:._-]+", host):
            raise click.BadParameter(f"a name or an address of a machine, not {host!r}", param_hint="HOST")
    made = make_certificates(out, hosts, days=days)
    for path in made:
        click.echo(path)
    click.echo("serve with --cert daemon.crt --key daemon.key; callers set TORCH_WATCHDOG_CA_FILE=ca.crt")
