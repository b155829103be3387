"""What `watchdog stop` and `watchdog checkpoint` share: one request to the daemon that decides for the job, and what came of it."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import print_json
from torch_watchdog.cli.source import DiskJob, JobLook, find_job, live_client
from torch_watchdog.daemon.client import client_of
from torch_watchdog.errors import DaemonUnreachableError, OrderRefusedError, WatchdogError
from torch_watchdog.launch.places import here
from torch_watchdog.launch.summary import as_typed, checkpoint_state
from torch_watchdog_proto.envelopes import OrderKind

__all__ = ["ask", "order_options"]

LOOK_EVERY_S = 0.2
Incident = Mapping[str, Any]


def order_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that both commands take."""
    wait = click.option("--wait/--no-wait", default=True, help="Wait until it is done, and tell what was saved where (default).")
    reason = click.option("--reason", default="", metavar="TEXT", help="Kept in the job's events.")
    return click.argument("job")(reason(wait(look_options(json_option(command)))))


def ask(context: click.Context, job: str, kind: OrderKind, *, reason: str, wait: bool, as_json: bool) -> None:
    """Raises OrderRefusedError where nothing came of it."""
    config = settings(context)
    look = find_job(job, directory=config.directory, daemon=config.daemon)
    before = _orders(look, kind)
    try:
        reached = live_client(look) if isinstance(look, DiskJob) else client_of(config.daemon, os.environ)
    except DaemonUnreachableError as error:
        raise OrderRefusedError(look.name, "it is not running: its launch has ended") from error
    with reached as client:
        answer = client.request(look.name, kind, by=f"{getpass.getuser()}@{socket.gethostname()}", reason=reason)
    if not answer.accepted:
        raise OrderRefusedError(look.name, answer.text)
    if wait and not as_json:
        click.echo(answer.text)
    came_of_it = _await_end(look, kind, known=len(before), grace_s=config.grace_s) if wait else None
    action = (came_of_it or {}).get("action") or {}
    if as_json:
        print_json({"job": look.name, "accepted": True, "text": answer.text, "checkpoint": action.get("checkpoint")})
    else:
        click.echo(answer.text if came_of_it is None else _told(came_of_it, action.get("checkpoint") or {}))


def _orders(look: JobLook, kind: OrderKind) -> Sequence[Incident]:
    return [found for found in look.incidents() if found.get("kind") == kind]


def _await_end(look: JobLook, kind: OrderKind, *, known: int, grace_s: float) -> Incident | None:
    """The order's own record once it has ended; None where another incident's order took its place, or nothing came in `grace_s`."""
    end_s = time.monotonic() + grace_s
    while time.monotonic() < end_s:
        try:
            found = _orders(look, kind)[known:]
            ended = not found and look.status().state == "ended"
        except WatchdogError:
            return None
        if found and found[0].get("status") == "resolved":
            return found[0]
        if ended:
            return None
        time.sleep(LOOK_EVERY_S)
    return None


def _told(incident: Incident, checkpoint: Mapping[str, Any]) -> str:
    if not checkpoint.get("path"):
        return f"no checkpoint was written: {incident.get('summary')}"
    return f"{as_typed(checkpoint['path'], here())} ({checkpoint_state(checkpoint)})"
