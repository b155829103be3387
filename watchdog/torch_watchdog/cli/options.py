"""The options that several commands share, and how the words of a command line become settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from torch_watchdog.config import LaunchConfig, load_config

__all__ = ["given_words", "json_option", "launch_options", "look_options", "settings"]

Command = TypeVar("Command", bound=Callable[..., Any])

_LAUNCH_OPTIONS = (
    click.option("--policy", metavar="stop|skip|observe", help="What happens on a bad batch (default: stop)."),
    click.option("--daemon", metavar="auto|HOST:PORT|unix:PATH", help="Who decides (default: auto, this launch hosts its own)."),
    click.option("--job", metavar="NAME", help="Name of the job (default: from the script and the time)."),
    click.option("--dir", metavar="DIR", help="Run directories are DIR/JOB (default: watchdog_runs)."),
    click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="Settings (default: watchdog.toml where there is one)."),
    click.option("--grace", metavar="SECONDS", help="How long a save after a fault or a stop may take (default: 300)."),
    click.option(
        "--alert", multiple=True, metavar="URL", help="Tell of incidents: pagerduty://KEY, alertmanager://HOST:PORT, or any Apprise URL."
    ),
    click.option("--web", metavar="auto|HOST:PORT", help="Serve this launch's page, API and metrics (auto: a free port of this host)."),
    click.option("--on-signal", metavar="checkpoint|pass", help="SIGTERM or SIGUSR1 saves and stops the job (default), or acts as ever."),
    click.option("--signal-grace", metavar="SECONDS", help="How long such a signal may be held back (default: 25)."),
    click.option("--no-keeper", is_flag=True, help="Do not hold the launcher back while ranks save."),
    click.option("--resume", metavar="PATH", help="Checkpoint that the script's restore() takes."),
    click.option("--quarantine", metavar="FILE", help="Samples to leave out from the start, as an earlier run wrote them."),
)
_LOOK_OPTIONS = (
    click.option("--dir", metavar="DIR", help="Where the run directories are (default: watchdog_runs)."),
    click.option("--daemon", metavar="HOST:PORT|unix:PATH", help="Ask this daemon (default: the job's own, found by its run directory)."),
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")


def launch_options(command: Command) -> Command:
    for option in reversed(_LAUNCH_OPTIONS):
        command = option(command)
    return command


def look_options(command: Command) -> Command:
    for option in reversed(_LOOK_OPTIONS):
        command = option(command)
    return command


def _given(context: click.Context) -> dict[str, Any]:
    """What was typed, outer options first: `watchdog --dir D run --job J -- CMD`."""
    outer = _given(context.parent) if context.parent else {}
    options = [parameter.name for parameter in context.command.params if isinstance(parameter, click.Option) and parameter.name]
    here = {name: context.params[name] for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    return outer | here


def settings(context: click.Context) -> LaunchConfig:
    """Flags before and after the command's name, environment, file, defaults. Raises ConfigError."""
    given = _given(context)
    flags: dict[str, Any] = {
        name: given[name]
        for name in ("policy", "daemon", "job", "dir", "grace", "on_signal", "signal_grace", "web", "alert", "resume", "quarantine")
        if name in given
    }
    if given.get("no_keeper"):
        flags["keeper"] = False
    return load_config(flags, file=given.get("config"))


def given_words(context: click.Context) -> tuple[str, ...]:
    """Our own options as they were typed, for the line that resumes with another checkpoint.

    The name stays, and gets a number: alerts of the run that stopped are over once one of the same name trains, and a token may be for this name only.
    """
    given = _given(context)
    words: list[str] = []
    for name in ("job", "policy", "daemon", "dir", "config", "grace", "on_signal", "signal_grace", "web"):
        if name in given:
            words += [f"--{name.replace('_', '-')}", str(given[name])]
    return (*words, "--no-keeper") if given.get("no_keeper") else tuple(words)
