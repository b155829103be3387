"""Thresholds that people set: what would end the rules, or make one tell everything or nothing, is refused; all else they bear."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from streams_made import Watch, everything

from torch_watchdog.knowledge import xid_codes
from torch_watchdog.rules.catalogue import check_settings, rules_with
from torch_watchdog.rules.limits import LIMITS

MUCH = 10**6
RULES = rules_with({})


def edges_of(settings: type[Any]) -> list[tuple[str, Any]]:
    """The least and the most that each number may be."""
    found = []
    for one in fields(settings):
        if not isinstance(one.default, bool):
            least, most = one.metadata.get("least", 0), one.metadata.get("most", math.inf)
            found += [(one.name, type(one.default)(edge)) for edge in (least, MUCH if math.isinf(most) else most)]
    return found


def test_in_that_run_nearly_every_rule_finds_something() -> None:
    told = {name for name, _, _ in everything(Watch(codes=xid_codes(), ids_creep={"enabled": True}, straggler={"hold_s": 5.0})).told}
    assert told == {rule.about.name for rule in RULES} - {"slow_loader"}


@pytest.mark.parametrize(
    ("name", "setting", "value"), [(rule.about.name, setting, value) for rule in RULES for setting, value in edges_of(rule.settings)]
)
def test_the_least_and_the_most_that_is_taken_is_borne(name: str, setting: str, value: float) -> None:
    """`loss_spike.steps = 40` was taken, and ended all rules of the job in its first minute."""
    changes: dict[str, dict[str, Any]] = {rule.about.name: {"enabled": False} for rule in RULES} | {name: {"enabled": True, setting: value}}
    check_settings(changes)
    everything(Watch(codes=xid_codes(), **changes))


OUTSIDE = [
    ("loss_spike", "steps", 0, "from 1 to 32"),
    ("loss_spike", "steps", 33, "from 1 to 32"),
    ("scaler_collapse", "fall", 0, "at least 2"),
    ("straggler", "ratio", 0.5, "at least 1"),
    ("straggler", "share", 20, "from 0 to 1"),
    ("supervision", "share", 5, "from 0 to 1"),
    ("ids_creep", "steady", 95, "from 0 to 1"),
    ("memory_pressure", "retries", 0, "at least 1"),
    ("gpu_throttle", "of_samples", 50, "from 0.02 to 1"),
    ("gpu_ecc", "corrected", 0, "at least 1"),
    ("hang", "shortest_s", 1, "at least 5"),
    ("hang", "of_timeout", 1.5, "from 0.1 to 1"),
]


@pytest.mark.parametrize(("name", "setting", "value", "words"), OUTSIDE)
def test_what_is_outside_is_refused_with_what_was_expected(name: str, setting: str, value: float, words: str) -> None:
    with pytest.raises(ValueError, match=f"{name} {setting} must be {words}, not {value}"):
        check_settings({name: {setting: value}})


@pytest.mark.parametrize("settings", [*(rule.settings for rule in RULES), *LIMITS.values()])
def test_every_number_is_by_default_within_what_may_be_set(settings: type[Any]) -> None:
    for one in fields(settings):
        assert one.metadata.get("least", 0) <= one.default <= one.metadata.get("most", math.inf)
