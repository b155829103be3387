"""Every rule by name, and their settings. The one list: engine, `watchdog rules` and configuration read it.

Owns the order and the check of `[rules]`; the judgement is each rule's own file. What is told of losses that are no numbers and of ranks that fail has
files of its own (`loss.py`, `death.py`), because orders follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_watchdog.rules import (
    gpu_ecc,
    gpu_link,
    gpu_lost,
    gpu_throttle,
    gpu_xid,
    ids_creep,
    ids_past_tokenizer,
    loss_spike,
    memory_fragmented,
    memory_pressure,
    probability_edge,
    scaler_collapse,
    slow_loader,
    straggler,
    supervision,
)
from torch_watchdog.rules.limits import LIMITS
from torch_watchdog.rules.settings import changed
from torch_watchdog.rules.sign import Rule
from torch_watchdog.rules.xid import XidCode

__all__ = ["check_settings", "rules_with", "settings_of"]


def rules_with(codes: Mapping[int, XidCode]) -> tuple[Rule, ...]:
    """All rules. `codes`: the catalogue of Xid codes."""
    return (
        loss_spike.RULE,
        scaler_collapse.RULE,
        supervision.RULE,
        ids_creep.RULE,
        ids_past_tokenizer.RULE,
        probability_edge.RULE,
        straggler.RULE,
        slow_loader.RULE,
        memory_pressure.RULE,
        memory_fragmented.RULE,
        gpu_xid.rule_with(codes),
        gpu_ecc.RULE,
        gpu_throttle.RULE,
        gpu_link.RULE,
        gpu_lost.RULE,
    )


def settings_of(rule: Rule, changes: Mapping[str, Mapping[str, Any]]) -> Any:
    """A rule's thresholds, with what `[rules.NAME]` changes. Raises ValueError."""
    return changed(rule.settings, changes.get(rule.about.name, {}))


def check_settings(changes: Mapping[str, Any]) -> None:
    """Raises ValueError where a table of `[rules]` names no rule, or a setting is not what it must be."""
    known = {rule.about.name: rule.settings for rule in rules_with({})} | dict(LIMITS)
    for name, values in changes.items():
        if name not in known:
            raise ValueError(f"names no rule {name!r}; known are {', '.join(known)}")
        if not isinstance(values, Mapping):
            raise ValueError(f"{name} must be a table of settings, not {values!r}")  # noqa: TRY004 - all that is wrong is one kind here
        try:
            changed(known[name], values)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
