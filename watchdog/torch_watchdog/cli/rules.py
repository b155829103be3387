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
    rules = [rule for rule in rules_with(xid_codes()) if name in (rule.about.name, rule.about.kind)]
    always = [about for about in ALWAYS if name in (about.name, about.kind)]
    if not rules and not always:
        names = dict.fromkeys(about.name for about in (*(rule.about for rule in rules_with({})), *ALWAYS))
        raise click.UsageError(f"there is no rule {name!r}; known are {', '.join(names)}, and the kinds of `watchdog rules list`")
    facts = [_facts(rule, changes) for rule in rules]
    always_facts = [_always_facts(about, changes) for about in always]
    if as_json:
        print_json(facts[0] if name in (rule.about.name for rule in rules) else {"rules": facts, "always": always_facts})
        return
    documented = [*(rule.settings for rule in rules), *(LIMITS.get(about.name) for about in always)]
    for number, (one, limits) in enumerate(zip([*facts, *always_facts], documented, strict=True)):
        print("\n" * bool(number), end="")
        _print_rule(one, limits)


def _print_rule(facts: Mapping[str, Any], settings: type[Any] | None) -> None:
    """The thresholds as one would write them into watchdog.toml."""
    print_facts({key: value for key, value in facts.items() if key != "settings"})
    if settings is None:
        return
    print(f"\n[rules.{facts['name']}]")
    print_facts({f"{key} =": str(value).lower() if isinstance(value, bool) else value for key, value in facts["settings"].items()})
    timing = f" {_TIMING}" if "hold_s" in facts["settings"] else ""
    print_text(f"\n{' '.join((settings.__doc__ or '').split())}{timing}")


@command.command("test")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def test(file: Path) -> int:
    """Judge a recorded run again and compare with what FILE expects.

    Judged are its steps and its GPUs: all rules, and losses and gradients that are no number. What ranks were told, and how they ended, is not.

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
    found, failure = judged_again(reports, codes=xid_codes(), changes=changes)
    if failure is not None:
        print(f"failed   {failure}")
        return 1
    missing = [one for one in expected if not any(_meets(incident, one) for incident in found)]
    surprises = [incident for incident in found if not any(_meets(incident, one) for one in expected)]
    for one in missing:
        print(f"missing  {one['kind']}" + (f" of rank {one['rank']}" if "rank" in one else ""))
    for incident in surprises:
        print(f"surprise {incident['kind']}: {incident['summary']}")
    if not missing and not surprises:
        print(f"ok: {len(found)} finding{'s' * (len(found) > 1)}, as expected" if found else "ok: silent, as expected")
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
    if unknown := values.keys() - {"run", "rules", "expect"}:
        raise ConfigError(str(file), f"has no place for {', '.join(sorted(unknown))}: known are run, [rules.NAME] and [[expect]]")
    if not isinstance(expected, list) or not all(map(_is_expectation, expected)):
        raise ConfigError(
            str(file), 'each [[expect]] must hold a kind, such as kind = "rank.straggler", and at most a rank, such as rank = 3'
        )
    judged = {rule.about.kind for rule in rules_with({})} | {"loss.not_finite", "grad.not_finite"}
    if unknown := {one["kind"] for one in expected} - judged:
        raise ConfigError(str(file), f"{', '.join(sorted(unknown))} is not judged again: [[expect]] may name {', '.join(sorted(judged))}")
    if not (run / "job.json").is_file():
        raise ConfigError(f"{file}, run", f"{run} is no run directory")
    return run, changes, expected


def _is_expectation(one: Any) -> bool:
    """No more than it must hold: a rank that is misspelt would be any rank."""
    return isinstance(one, dict) and one.keys() <= {"kind", "rank"} and isinstance(one.get("kind"), str) and type(one.get("rank", 0)) is int


def _meets(incident: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    rank = incident["origin"]["rank"]
    return bool(incident["kind"] == expected["kind"] and expected.get("rank", rank) == rank)


def _always_facts(about: About, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` only where there is something to set."""
    limits = LIMITS.get(about.name)
    return dataclasses.asdict(about) | ({} if limits is None else {"settings": dataclasses.asdict(limits_of(limits, changes))})


def _facts(rule: Rule, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {**dataclasses.asdict(rule.about), "settings": dataclasses.asdict(settings_of(rule, changes))}
