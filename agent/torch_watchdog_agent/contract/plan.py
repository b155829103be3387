"""The checks for batches of one signature (keys, shapes, dtypes), made ready once. Owns what is checked how; judges one batch at a time.

A rule over one leaf is first held against the whole leaf, which is exact for most and enough for all batches that pass; only where that
fails are the elements that really reach the consumer looked at. Other rules are replayed unless they follow from the leaf checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_watchdog_agent.contract.bounds import BIG, Range
from torch_watchdog_agent.contract.check import Extremes, allows
from torch_watchdog_agent.contract.discharge import ValueSets, follows, value_sets
from torch_watchdog_agent.contract.kinds import offending
from torch_watchdog_agent.contract.recipe import VIEWS
from torch_watchdog_agent.contract.replay import Program, instantiated
from torch_watchdog_agent.contract.rules import Rule
from torch_watchdog_agent.contract.sizes import AmbiguousSizeError, Shapes
from torch_watchdog_agent.errors import let_through

__all__ = ["Check", "Finding", "Plan", "plan_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that a batch breaks: the replayed values, and where they offend."""

    rule: Rule
    allowed: Range
    values: tuple[torch.Tensor, ...]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One rule for this signature."""

    rule: Rule
    allowed: Range
    program: Program
    exact: bool = False  # the whole leaf is what reaches the consumer
    dropped: int = 0  # elements of the leaf that never reach the consumer


@dataclass(slots=True)
class Plan:
    """All checks of one signature. `unsettled`: rules that cannot say anything about these shapes before one more trace."""

    by_leaf: dict[str, list[Check]] = field(default_factory=dict)
    derived: list[Check] = field(default_factory=list)
    proved: list[Check] = field(default_factory=list)  # hold while every leaf passes as a whole
    shape: list[Finding] = field(default_factory=list)
    unsettled: list[Rule] = field(default_factory=list)
    broken: list[Rule] = field(default_factory=list)  # their computation fails at these shapes
    ignored: dict[str, int] = field(default_factory=dict)
    legal: dict[str, tuple[float, float]] = field(default_factory=dict)  # the range of a whole leaf, where that is what its consumer takes

    def findings(self, leaves: Mapping[str, torch.Tensor], seen: Mapping[str, Extremes]) -> tuple[list[Finding], list[Rule]]:
        """What this batch breaks, the first consumer first; and rules whose computation it breaks, so that they cannot say."""
        doubtful = [check for key, checks in self.by_leaf.items() for check in checks if not _passes(check, seen[key])]
        if doubtful:  # then nothing follows from the leaves any more
            doubtful += self.proved
        found, failed = list(self.shape), []
        for check in (*doubtful, *self.derived):
            try:
                one = _judged(check, leaves)
            except (RuntimeError, IndexError, ValueError) as error:
                let_through(error)
                failed.append(check.rule)
                continue
            found += [one] if one is not None else []
        return sorted(found, key=lambda finding: finding.rule.order) if len(found) > 1 else found, failed


def _passes(check: Check, seen: Extremes) -> bool:
    """Whether the whole leaf says that nothing can be wrong."""
    if check.rule.kind == "some":
        return seen.array is not None and seen.ignored + check.dropped < seen.array.size
    return allows(check.allowed, seen)


def _judged(check: Check, leaves: Mapping[str, torch.Tensor]) -> Finding | None:
    values = check.program.run(leaves)
    mask = offending(check.rule.kind, values, check.allowed, check.rule.options)
    return None if mask is None else Finding(rule=check.rule, allowed=check.allowed, values=values, mask=mask)


def plan_for(rules: Sequence[Rule], leaves: Mapping[str, torch.Tensor], shapes: Shapes, *, unread: frozenset[str] = frozenset()) -> Plan:
    """The checks for this batch's signature. Costs milliseconds: once per signature. Of tensors that are `unread` only the shape counts."""
    plan = Plan()
    readable = {key: tensor for key, tensor in leaves.items() if tensor.device.type == "cpu"}
    pending: list[Check] = []
    for rule in rules:
        if any(key not in readable for key in rule.recipe.leaves.values()):
            continue
        try:
            pending += _enter(plan, rule, readable, shapes, unread)
        except AmbiguousSizeError:
            plan.unsettled.append(rule)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            let_through(error)
            plan.broken.append(rule)
    _sort_out(plan, pending, readable)
    return plan


def _enter(plan: Plan, rule: Rule, leaves: Mapping[str, torch.Tensor], shapes: Shapes, unread: frozenset[str]) -> Iterator[Check]:
    allowed = rule.allowed(shapes)
    if rule.kind in ("spread", "reach"):
        if offending(rule.kind, (), allowed, rule.options) is not None:
            plan.shape.append(Finding(rule=rule, allowed=allowed, values=(), mask=torch.ones(1, dtype=torch.bool, device="cpu")))
        return
    recipe = rule.recipe
    if not recipe.leaves and not recipe.steps:
        return
    program = Program(recipe, instantiated(recipe, leaves, shapes, by_shape=not unread.isdisjoint(recipe.leaves.values())))
    check = Check(rule=rule, allowed=allowed, program=program)
    if not recipe.leaves:
        one = _judged(check, leaves)
        plan.shape += [one] if one is not None else []
        return
    yield check


def _sort_out(plan: Plan, pending: Sequence[Check], leaves: Mapping[str, torch.Tensor]) -> None:
    """Direct checks first, then what follows from them, then checks that a legal leaf makes needless, then what follows from those."""
    rest = _enter_leaves(plan, pending, leaves, lambda check, _: check.rule.kind == "range" and check.rule.recipe.is_direct)
    rest = _set_aside(plan, rest, leaves)
    rest = _enter_leaves(plan, rest, leaves, lambda check, key: _leaf_is_enough(check, key, leaves[key]))
    plan.derived = _set_aside(plan, rest, leaves)
    for key, checks in plan.by_leaf.items():
        plan.by_leaf[key] = _undominated(checks)
        exact = [check.allowed for check in plan.by_leaf[key] if check.exact and check.allowed.high < BIG]
        if exact:
            plan.legal[key] = float(exact[0].low), float(exact[0].high)


def _enter_leaves(
    plan: Plan, checks: Sequence[Check], leaves: Mapping[str, torch.Tensor], enough: Callable[[Check, str], bool]
) -> list[Check]:
    """Checks for which the whole leaf is enough go to their leaf; returns the others."""
    rest = []
    for check in checks:
        key = check.rule.recipe.one_leaf or _only_leaf(check)
        if key is None or not enough(check, key):
            rest.append(check)
            continue
        plan.by_leaf.setdefault(key, []).append(_whole(check, key, leaves[key]))
        if check.allowed.ignored is not None:
            plan.ignored.setdefault(key, check.allowed.ignored)
    return rest


def _set_aside(plan: Plan, checks: Sequence[Check], leaves: Mapping[str, torch.Tensor]) -> list[Check]:
    """Checks that follow from the leaf checks so far are proved; returns the others."""
    sets = _leaf_sets(plan, leaves)
    rest: list[Check] = []
    for check in checks:
        (plan.proved if follows(check.rule, check.program, check.allowed, sets) else rest).append(check)
    return rest


def _only_leaf(check: Check) -> str | None:
    names = set(check.rule.recipe.leaves.values())
    return next(iter(names)) if len(names) == 1 else None


def _leaf_is_enough(check: Check, key: str, leaf: torch.Tensor) -> bool:
    """Whether a leaf that is legal as a whole makes the index legal."""
    if check.rule.kind == "some":
        return check.rule.recipe.one_leaf is not None and _moves_only(check) and check.rule.ignored == check.allowed.ignored
    if check.rule.kind != "range":
        return False
    return follows(check.rule, check.program, check.allowed, {key: value_sets(leaf, [check.allowed])})


def _moves_only(check: Check) -> bool:
    return all(step.name in VIEWS or step.name in ("slice", "select", "constant_pad_nd", "unbind") for step in check.rule.recipe.steps)


def _whole(check: Check, key: str, leaf: torch.Tensor) -> Check:
    exact = check.rule.recipe.is_direct and all(step.name in VIEWS for step in check.rule.recipe.steps)
    dropped = 0
    if check.rule.kind == "some":
        ids = torch.arange(leaf.numel(), device="cpu").reshape(leaf.shape)
        (reached,) = check.program.run({key: ids})
        kept = set(reached.reshape(-1).tolist()) if leaf.numel() <= 1 << 16 else None
        # a large leaf: what is not there any more was dropped; a padding value counts as one element at most
        dropped = leaf.numel() - (
            len(kept & set(range(leaf.numel()))) if kept is not None else min(leaf.numel(), reached.unique().numel() - 1)
        )
    return Check(rule=check.rule, allowed=check.allowed, program=check.program, exact=exact and check.rule.kind == "range", dropped=dropped)


def _undominated(checks: Sequence[Check]) -> list[Check]:
    """Without the checks that another check of the same leaf makes needless."""
    kept: list[Check] = []
    for check in sorted(checks, key=lambda one: (one.rule.kind, one.allowed.high - one.allowed.low, one.rule.order)):
        stronger = (other for other in kept if other.rule.kind == check.rule.kind == "range" and other.exact)
        if not any(other.allowed.within(check.allowed) and other.rule.acts_alone >= check.rule.acts_alone for other in stronger):
            kept.append(check)
    return kept


def _leaf_sets(plan: Plan, leaves: Mapping[str, torch.Tensor]) -> ValueSets:
    """The values that each leaf may hold once it has passed its checks."""
    sets = {}
    for key, tensor in leaves.items():
        ranges = [check.allowed for check in plan.by_leaf.get(key, ()) if check.rule.kind == "range"]
        values = value_sets(tensor, ranges)
        if values is not None:
            sets[key] = values
    return sets
