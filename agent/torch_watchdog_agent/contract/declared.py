"""Bounds that a person has declared, by `declare_bound()` or in the launch's settings: rules like the learned ones, but certain from the first batch.

Owns the list of them. The guard adds `declared_rules()` to the learned rules wherever it makes a plan; `declared_version()` says when it must make a new one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_watchdog_agent.contract.bounds import BIG
from torch_watchdog_agent.contract.frames import Place
from torch_watchdog_agent.contract.recipe import Recipe
from torch_watchdog_agent.contract.rules import TRACES_FOR_DIRECT, Rule
from torch_watchdog_proto.names import spoken

__all__ = ["all_declared", "declare_bound", "declared_rules", "declared_version", "meets_none", "take_settings"]

_rules: dict[str, Rule] = {}  # by the name as it was written
_version = 0


def declare_bound(key: str, *, low: int = 0, high: int | None = None, ignored: int | None = None) -> None:
    """Every element of the batch's tensor `key` must be within `low` and `high`, both included, or be `ignored`. A batch that breaks it is a bad batch.

    `key` is the tensor's path in the batch, `labels`, `0.targets`, `1`, or as people are told it: `batch[0].targets`. Declared again, the last word
    counts. Raises ValueError for an empty range.
    """
    frame = sys._getframe(1)
    _declare(key, low, high, ignored, source=f"{Path(frame.f_code.co_filename)}:{frame.f_lineno}")


def take_settings(bounds: Mapping[str, Any]) -> None:
    """The launch's `[bounds]`: `labels = {low = 0, high = 9, ignored = -100}`."""
    for key, bound in bounds.items():
        _declare(key, bound.get("low", 0), bound.get("high"), bound.get("ignored"), source="[bounds] in watchdog.toml")


def declared_rules(keys: Iterable[str]) -> list[Rule]:
    """The rules for a batch that has these tensors."""
    if not _rules:
        return []
    return [_held_to(key, _rules[name]) for key in keys for name in dict.fromkeys((key, spoken(key))) if name in _rules]


def meets_none(rule: Rule, keys: Collection[str]) -> bool:
    """Whether no tensor of these is the one that was declared."""
    return rule.arg not in keys and all(spoken(key) != rule.arg for key in keys)


def all_declared() -> list[Rule]:
    return list(_rules.values())


def declared_version() -> int:
    """Changes with every declaration."""
    return _version


def _declare(key: str, low: int, high: int | None, ignored: int | None, *, source: str) -> None:
    global _version
    if high is not None and high < low:
        raise ValueError(f"the bound of {key!r} allows nothing: low is {low}, high is {high}; swap them")
    for other in [name for name in _rules if name == spoken(key) or spoken(name) == key]:
        del _rules[other]  # the same tensor in the other spelling
    place = Place(module=None, source=source, op="declared", call=(source, 0))
    recipe = _recipe(key)
    _rules[key] = Rule(
        order=-1,
        op="declared",
        arg=key,
        kind="range",
        place=place,
        recipe=recipe,
        low=low,
        ignored=ignored,
        wraps=False,
        options={},
        rows=BIG if high is None else high + 1,
        live=None,
        learned_from="declared by you",
        traces=TRACES_FOR_DIRECT,
    )
    _version += 1


def _recipe(key: str) -> Recipe:
    return Recipe(leaves={0: key}, constants={}, steps=(), outputs=(0,), batches=frozenset(), form=("declared", key), casts=False)


@functools.cache  # rules are known by identity
def _held_to(key: str, rule: Rule) -> Rule:
    """Of a bound that was written as people are told the tensor."""
    return rule if rule.arg == key else replace(rule, arg=key, recipe=_recipe(key))
