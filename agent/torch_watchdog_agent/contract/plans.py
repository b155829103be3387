"""The checks of each kind of batch, made ready when one first comes and again once more is known. Owns when they are made anew, and how many are kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_watchdog_agent.contract.declared import declared_rules, declared_version
from torch_watchdog_agent.contract.learn import Contract
from torch_watchdog_agent.contract.ondevice import NO_CHECKS, DeviceChecks
from torch_watchdog_agent.contract.placement import stand_ins, taken_from
from torch_watchdog_agent.contract.plan import Plan, plan_for
from torch_watchdog_agent.contract.rules import Rule
from torch_watchdog_agent.contract.signature import Signature, shapes_of, structure_of

__all__ = ["MAX_PLANS", "Plans"]

MAX_PLANS = 256


class Plans:
    """Of one contract. `uncovered`: rules that are not checked on a device, and why."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._made: dict[tuple[Signature, frozenset[str]], tuple[int, Plan, DeviceChecks]] = {}
        self.uncovered: dict[Rule, str] = {}

    @property
    def version(self) -> int:
        """Changes with everything that a plan is made of."""
        return self._contract.version + declared_version()

    def of(self, signature: Signature, leaves: Mapping[str, torch.Tensor], elsewhere: frozenset[str]) -> tuple[Plan, DeviceChecks]:
        """`elsewhere`: the leaves that lie on a device, whose values nobody reads here."""
        if self._contract.is_outdated():
            self._contract.forget_changed()
        known = self._made.get((signature, elsewhere))
        if known is not None and known[0] == self.version:
            return known[1], known[2]
        if len(self._made) >= MAX_PLANS:
            self._made.clear()
        shaped = stand_ins(leaves, elsewhere) if elsewhere else leaves
        plan = plan_for(
            [*declared_rules(shaped), *self._contract.usable(structure_of(signature))], shaped, shapes_of(shaped), unread=elsewhere
        )
        checks = NO_CHECKS
        if elsewhere:
            checks = taken_from(plan, leaves, shaped, elsewhere, frozenset(self._contract.flowed - self._contract.handled))
            self.uncovered = {rule: why for rule, why in self.uncovered.items() if rule.usable} | dict(checks.uncovered)
        self._made[signature, elsewhere] = (self.version, plan, checks)
        return plan, checks

    def forget(self) -> None:
        self._made.clear()
