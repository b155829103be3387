"""`watchdog rules`: what is watched in every run, with which thresholds, and whether a recorded run gives what is expected of it."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from torch_watchdog.cli.options import json_option, settings
from torch_watchdog.cli.output import print_facts, print_json, print_table, print_text
from torch_watchdog.errors import ConfigError
from torch_watchdog.job.replay import judged_again
from torch_watchdog.knowledge import xid_codes
from torch_watchdog.rules.always import ALWAYS
from torch_watchdog.rules.catalogue import check_settings, rules_with, settings_of
from torch_watchdog.rules.limits import LIMITS, limits_of
from torch_watchdog.rules.sign import About, Rule
from torch_watchdog.store.read import read_reports

__all__ = ["command"]

_TIMING = "Its sign must hold for `hold_s` seconds before it is told, and be away for `keep_s` before it is over."
_config = click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="Settings (default: watchdog.toml where there is one)."
)


@click.group("rules")
def command() -> None:
    """What is watched in every run, and with which thresholds."""


@command.command("list")
@_config
@json_option
@click.pass_context
def list_rules(context: click.Context, /, as_json: bool, **_: object) -> None:
    """Every rule: the kind of its incidents, what it watches. `always`: it cannot be turned off."""
    changes = settings(context).rules
    rules = rules_with(xid_codes())
    if as_json:
        print_json({"rules": [_facts(rule, changes) for rule in rules], "always": [_always_facts(about, changes) for about in ALWAYS]})
        return
    rows = [
        (rule.about.name, rule.about.kind, rule.about.severity, "on" if settings_of(rule, changes).enabled else "off", rule.about.watches)
        for rule in rules
    ]
    rows += [(about.name, about.kind, about.severity, "always", about.watches) for about in ALWAYS]
    print_table(("rule", "kind", "severity", "", "watches"), rows, empty="there are no rules")


@command.command("show")
@click.argument("name")
@_config
@json_option
@click.pass_context
def show(context: click.Context, /, name: str, as_json: bool, **_: object) -> None:
    """One rule, or all that give a kind: thresholds as they are set here, what it says, what follows."""
    changes = settings(context).rules
    always = [_always_facts(about, changes) for about in ALWAYS if name in (about.name, about.kind)]
    if always:
        _show_always(always, as_json=as_json)
        return
    rules = {rule.about.name: rule for rule in rules_with(xid_codes())}
    if name not in rules:
        raise click.UsageError(
            f"there is no rule {name!r}; known are {', '.join(dict.fromkeys([*rules, *(about.name for about in ALWAYS)]))}"
        )
    facts = _facts(rules[name], changes)
    if as_json:
        print_json(facts)
        return
    _print_with_settings(facts, rules[name].settings)


def _print_with_settings(facts: Mapping[str, Any], settings: type[Any]) -> None:
    """As one would write them into watchdog.toml."""
    print_facts({key: value for key, value in facts.items() if key != "settings"})
    print(f"\n[rules.{facts['name']}]")
    print_facts({f"{key} =": str(value).lower() if isinstance(value, bool) else value for key, value in facts["settings"].items()})
    timing = f" {_TIMING}" if "hold_s" in facts["settings"] else ""
    print_text(f"\n{' '.join((settings.__doc__ or '').split())}{timing}")


def _show_always(always: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json({"always": always})
        return
    for number, facts in enumerate(always):
        print("\n" * bool(number), end="")
        if "settings" in facts:
            _print_with_settings(facts, LIMITS[facts["name"]])
        else:
            print_facts(facts)


@command.command("test")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def test(file: Path) -> int:
    """Judge a recorded run again and compare with what FILE expects.

    \b
    run = "watchdog_runs/train-1"    # a run directory, beside FILE or absolute
    [rules.straggler]                # thresholds to try
    ratio = 1.3
    [[expect]]                       # none: the run must be silent
    kind = "rank.straggler"
    rank = 3                         # leave out: any
    """
    run, changes, expected = _read_test(file)
    reports = ((node, report) for node, _, report in read_reports(run))
    found = judged_again(reports, codes=xid_codes(), changes=changes)
    missing = [one for one in expected if not any(_meets(incident, one) for incident in found)]
    surprises = [incident for incident in found if not any(_meets(incident, one) for one in expected)]
    for one in missing:
        print(f"missing  {one['kind']}" + (f" of rank {one['rank']}" if "rank" in one else ""))
    for incident in surprises:
        print(f"surprise {incident['kind']}: {incident['summary']}")
    if not missing and not surprises:
        print(f"ok: {len(found)} findings, as expected" if found else "ok: silent, as expected")
    return 1 if missing or surprises else 0


def _read_test(file: Path) -> tuple[Path, Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Raises ConfigError."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        run = file.parent / str(values["run"])
        changes, expected = values.get("rules", {}), values.get("expect", [])
        check_settings(changes)
    except KeyError:
        raise ConfigError(str(file), 'must name a run directory: run = "watchdog_runs/JOB"') from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), str(error)) from None
    if not isinstance(expected, list) or not all(isinstance(one, dict) and isinstance(one.get("kind"), str) for one in expected):
        raise ConfigError(str(file), 'each [[expect]] must hold a kind, such as kind = "rank.straggler"')
    if not (run / "job.json").is_file():
        raise ConfigError(f"{file}, run", f"{run} is no run directory")
    return run, changes, expected


def _meets(incident: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    rank = incident["origin"]["rank"]
    return bool(incident["kind"] == expected["kind"] and expected.get("rank", rank) == rank)


def _always_facts(about: About, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` only where there is something to set."""
    limits = LIMITS.get(about.name)
    return dataclasses.asdict(about) | ({} if limits is None else {"settings": dataclasses.asdict(limits_of(limits, changes))})


def _facts(rule: Rule, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {**dataclasses.asdict(rule.about), "settings": dataclasses.asdict(settings_of(rule, changes))}
