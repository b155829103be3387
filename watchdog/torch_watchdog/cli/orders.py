"""What `watchdog stop` and `watchdog checkpoint` share: one request to the daemon that decides for the job."""

from __future__ import annotations

import getpass
import os
import socket

import click

from torch_watchdog.cli.options import settings
from torch_watchdog.cli.output import print_json
from torch_watchdog.cli.source import DiskJob, find_job, live_daemon
from torch_watchdog.daemon.client import client_of
from torch_watchdog.errors import DaemonUnreachableError, OrderRefusedError
from torch_watchdog_proto.envelopes import OrderKind

__all__ = ["ask"]


def ask(context: click.Context, job: str, kind: OrderKind, *, reason: str, as_json: bool) -> None:
    """Raises OrderRefusedError where nothing will come of it."""
    config = settings(context)
    look = find_job(job, directory=config.directory, daemon=config.daemon)
    try:
        address = live_daemon(look) if isinstance(look, DiskJob) else config.daemon
    except DaemonUnreachableError as error:
        raise OrderRefusedError(look.name, "it is not running: its launch has ended") from error
    with client_of(address, os.environ) as client:
        answer = client.request(look.name, kind, by=f"{getpass.getuser()}@{socket.gethostname()}", reason=reason)
    if as_json:
        print_json({"job": look.name, "accepted": answer.accepted, "text": answer.text})
    elif answer.accepted:
        print(answer.text)
    if not answer.accepted:
        raise OrderRefusedError(look.name, answer.text)
