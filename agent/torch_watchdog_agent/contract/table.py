"""The contract as a JSON-able table, for `watchdog contract`. Owns the columns; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_watchdog_agent.contract.bounds import BIG
from torch_watchdog_agent.contract.declared import all_declared, declared_rules, meets_none
from torch_watchdog_agent.contract.learn import Contract
from torch_watchdog_agent.contract.rules import Rule
from torch_watchdog_agent.contract.sizes import Size
from torch_watchdog_agent.contract.words import expression, size_words

__all__ = ["as_table", "unmet_bounds"]


def as_table(contract: Contract, on_device: Mapping[Rule, str]) -> dict[str, object]:
    """What is guarded, what is not and why. `on_device`: rules that a batch on a device is not held to in every step, and why."""
    met = {key for tensors, *_ in contract.traces_of for key, *_ in tensors}
    amiss = [rule for rule in all_declared() if met and meets_none(rule, met)]
    declared = declared_rules(sorted(met)) if met else all_declared()
    rules = [*declared, *sorted(contract.rules.values(), key=lambda rule: rule.order)]
    guarded = [
        _row(rule) for rule in rules if rule.usable and (rule.recipe.leaves or rule.recipe.steps or rule.kind in ("spread", "reach"))
    ]
    opaque = [{**_row(rule), "why": rule.opaque} for rule in rules if rule.opaque]
    opaque += [
        {"key": None, "expression": "", "op": op, "argument": arg, "module": module, "source": source, "why": why}
        for (op, arg, module, source), why in contract.opaque.items()
    ]
    opaque += [{**_row(rule), "why": f"no traced batch has a tensor of this name: they have {', '.join(sorted(met))}"} for rule in amiss]
    opaque += [{**_row(rule), "why": why} for rule, why in on_device.items() if rule.usable]
    return {"traces": contract.traces, "guarded": guarded, "opaque": opaque}


def unmet_bounds(table: Mapping[str, Any]) -> list[str]:
    """A sentence for each declared bound that no batch has met, by such a table: misspelt, mostly."""
    unmet = [row for row in table["opaque"] if row["op"] == "declared"]
    return [f"the bound that {row['source']} declares for {row['key']} holds for nothing so far: {row['why']}" for row in unmet]


def _row(rule: Rule) -> dict[str, Any]:
    rows = rule.live.rows() if rule.live is not None else rule.rows
    return {
        "key": next(iter(rule.recipe.leaves.values()), None),
        "expression": expression(rule.recipe),
        "op": rule.op,
        "argument": rule.arg,
        "kind": rule.kind,
        "bound": _bound(rule, rows),
        "source": rule.place.source,
        "module": rule.place.module,
        "learned_from": rule.learned_from,
        "acts_alone": rule.acts_alone,
        "acts_unseen": rule.acts_unseen,
    }


def _bound(rule: Rule, rows: Any) -> dict[str, Any]:
    if rule.kind not in ("range", "ctc", "spread", "count", "agree", "sum", "reach"):
        return {"low": None, "high": None, "ignored": [] if rule.ignored is None else [rule.ignored]}
    if isinstance(rows, Size) and size_words(rows).isdecimal():
        rows = int(size_words(rows))
    high = None if isinstance(rows, int) and rows >= BIG else rows - 1 if isinstance(rows, int) else f"{size_words(rows)} - 1"
    low: Any = rule.low
    if rule.kind == "reach":
        high = rule.options["limit"] - 1
    if rule.kind in ("count", "agree", "sum"):
        high = rows if isinstance(rows, int) else size_words(rows)
        low = high if rule.kind != "count" or rule.options["exact"] else 0
    if rule.wraps:
        low = -rows if isinstance(rows, int) else f"-{size_words(rows)}"
    return {"low": low, "high": high, "ignored": [] if rule.ignored is None else [rule.ignored]}
