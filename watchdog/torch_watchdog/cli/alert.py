"""`watchdog alert`: try a receiver, see what is open, keep some of it quiet."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from torch_watchdog.alerts.alert import Action, Alert, Delivery
from torch_watchdog.alerts.heard import hearing, why
from torch_watchdog.alerts.receivers import Receiver, receiver_of
from torch_watchdog.cli.options import json_option, look_options, settings
from torch_watchdog.cli.output import moment, print_json, print_table
from torch_watchdog.cli.source import find_job, has_own_daemon, live_daemon
from torch_watchdog.config import LaunchConfig
from torch_watchdog.daemon.client import client_of
from torch_watchdog.errors import AlertError, ConfigError, DaemonUnreachableError
from torch_watchdog.launch.places import here
from torch_watchdog.launch.say import say
from torch_watchdog.phrases import as_typed
from torch_watchdog.store.alerts import left_open
from torch_watchdog.user import caller

__all__ = ["command", "daemon_of"]

_ADVICE = (
    "Check host, port and key of the URL, and that this machine reaches it (a firewall, a proxy: HTTPS_PROXY). The forms: pagerduty://..., "
    "alertmanager://HOST:PORT, and Apprise's list of services"
)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@click.group("alert", short_help="Try a receiver of alerts; see and silence what is open.")
def command() -> None:
    """Alerts: try a receiver, see what is open, keep some of it quiet."""


@command.command("test", short_help="Send a page and its resolve.")
@click.argument("url")
def test(url: str) -> None:
    """Send a page and its resolve to URL, and show what was answered."""
    receiver = receiver_of(url.partition("://")[0], url)
    with hearing() as records:
        try:
            asyncio.run(_test(receiver))
        except AlertError as error:
            more = why(records, url)
            raise AlertError(error.receiver, f"{error.reason}: {more}" if more else error.reason, advice=_ADVICE) from error


async def _test(receiver: Receiver) -> None:
    now = time.time()
    alert = Alert(
        key=f"test-{socket.gethostname()}", training_job="alert-test", job="alert-test", attempt=0, incident="1", kind="rank.hang", severity="warning",
        title="alert-test: this is only a test of `watchdog alert test`",
        lines=("nothing is wrong", f"sent by {caller()}", "done: nothing", "a RESOLVED message follows"), starts_s=now, node=socket.gethostname(),
    )  # fmt: skip
    over = replace(alert, resolved=True, resolved_by="the test is over")
    steps: Sequence[tuple[Action, Delivery]] = [
        ("trigger", Delivery(receiver=receiver.name, action="trigger", alert=alert, version=1, ends_s=now + 300.0)),
        ("resolve", Delivery(receiver=receiver.name, action="resolve", alert=over, version=2, ends_s=time.time(), again=True)),
    ]
    try:
        for action, delivery in steps:
            click.echo(f"{action}: {await receiver.send(delivery)}")
    finally:
        await receiver.close()


@command.command("list", short_help="The alerts that are open.")
@look_options
@json_option
@click.pass_context
def list_open(context: click.Context, /, as_json: bool, **_: object) -> None:
    """List the alerts that the daemon has open, and what it keeps quiet (--daemon; else the newest launch's own).

    Where that has ended: what the launches in --dir have left open.
    """
    config = settings(context)
    try:
        with client_of(daemon_of(config, None), os.environ) as client:
            found, silences = client.alerts_and_silences()
    except DaemonUnreachableError:
        if config.daemon != "auto" or not has_own_daemon(find_job(None, directory=config.directory, daemon="auto")):
            raise
        say(
            f"no daemon runs here: what the launches in {as_typed(str(config.directory), here())} have left open (a running one: --daemon HOST:PORT)"
        )
        found, silences = tuple(asdict(alert) | {"name": alert.name} for alert in left_open(config.directory, now=time.time())), ()
    if as_json:
        print_json({"alerts": list(found), "silences": list(silences)})
        return
    rows = [
        (one["name"], one["severity"], one["kind"], moment(one["starts_s"]), one["acknowledged_by"] or "", one["title"]) for one in found
    ]
    print_table(("incident", "severity", "kind", "since", "whose", "what"), rows, empty="no alert is open")
    quiet = [_silence_row(silence) for silence in silences if silence["until_s"] > time.time()]
    if quiet:
        print()
        print_table(("kept quiet: jobs", "kinds", "severities", "until", "by", "why"), quiet, empty="")


def _silence_row(silence: Mapping[str, Any]) -> tuple[object, ...]:
    match = (" ".join(silence["match"][name]) or "all" for name in ("jobs", "kinds", "severities"))
    return (*match, moment(silence["until_s"]), silence["by"], silence["comment"])


@command.command("silence", short_help="Keep alerts quiet for a time.")
@click.option("--job", "jobs", multiple=True, metavar="PATTERN", help="Jobs, as `prod-*` (default: all).")
@click.option("--kind", "kinds", multiple=True, metavar="PATTERN", help="Kinds, as `rank.*` (default: all).")
@click.option("--severity", "severities", multiple=True, type=click.Choice(["warning", "critical"]), help="Default: both.")
@click.option("--for", "duration", required=True, metavar="2h", help="How long: a number and s, m, h or d.")
@click.option("--comment", default="", metavar="TEXT", help="Why.")
@look_options
@click.pass_context
def silence(
    context: click.Context,
    /,
    jobs: Sequence[str],
    kinds: Sequence[str],
    severities: Sequence[str],
    duration: str,
    comment: str,
    **_: object,
) -> None:
    """Tell nobody of what fits, for a time. What is still open then is told."""
    seconds, config = _duration_s(duration), settings(context)
    try:
        client = client_of(daemon_of(config, None), os.environ)
    except DaemonUnreachableError as error:
        raise ConfigError(
            "--daemon", "a running daemon keeps alerts quiet, and the newest launch here has ended: name a `watchdog serve`"
        ) from error
    with client:
        answer = client.silence(jobs=jobs, kinds=kinds, severities=severities, seconds=seconds, by=caller(), comment=comment)
    click.echo(answer.text)


def daemon_of(config: LaunchConfig, job: str | None) -> str:
    """The daemon that was named, else the job's own."""
    if config.daemon != "auto":
        return config.daemon
    return live_daemon(find_job(job, directory=config.directory, daemon="auto"))


def _duration_s(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if found is None:
        raise click.BadParameter("a number and s, m, h or d, as 90m or 2h", param_hint="--for")
    return int(found[1]) * _SECONDS[found[2]]
