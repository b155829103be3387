"""`watchdog doctor`: what works here, and what to do about what does not."""

from __future__ import annotations

import dataclasses
import sys

import click

from torch_watchdog.cli.options import json_option, settings
from torch_watchdog.cli.output import print_json, print_lines, print_table
from torch_watchdog.doctor import Finding, changes, examine

__all__ = ["command"]

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command("doctor", short_help="Check what works on this machine.")
@click.option("--changes", "show_changes", is_flag=True, help="List every variable and patch that a wrapped launch gets.")
@click.option("--dir", metavar="DIR", help="Where run directories would be made (default: watchdog_runs).")
@json_option
@click.pass_context
def command(context: click.Context, /, show_changes: bool, as_json: bool, **_: object) -> None:
    """Check what works on this machine; exit 1 where something fails."""
    if show_changes:
        _show_changes(as_json)
        return
    found, config = [], settings(context)
    for finding in examine(directory=config.directory, enabled=config.enabled):
        found.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print_json({"checks": [dataclasses.asdict(finding) for finding in found]})
    if any(finding.state == "fail" for finding in found):
        context.exit(1)


def _print(finding: Finding) -> None:
    print_lines([[(f"{finding.state:<5}", _STYLES[finding.state]), (f" {finding.name}: {finding.text}", "")]])
    if finding.advice:
        print_lines([[(f"      {finding.advice}", "dim")]])


def _show_changes(as_json: bool) -> None:
    try:
        found = changes()
    except RuntimeError as error:
        raise click.ClickException(f"{sys.executable} cannot be asked: {error}") from error
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    print_table(("variable", "what for"), list(found.variables.items()), empty="")
    print()
    print_table(("patched when imported", "hook"), list(found.patches.items()), empty="")
