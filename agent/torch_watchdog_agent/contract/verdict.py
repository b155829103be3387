"""From findings and oddities to what the guard says: at most one violation that acts, and warnings. Owns what is certain enough; pure."""

from __future__ import annotations

from collections.abc import Sequence

from torch_watchdog_agent.contract.explain import odd_violation, violation_of
from torch_watchdog_agent.contract.findings import Oddity
from torch_watchdog_agent.contract.learn import Contract
from torch_watchdog_agent.contract.plan import Finding
from torch_watchdog_agent.contract.replay import resolver
from torch_watchdog_agent.contract.signature import shapes_of
from torch_watchdog_agent.contract.where import Origin
from torch_watchdog_proto.messages import Violation

__all__ = ["verdict"]


def verdict(
    contract: Contract, findings: Sequence[Finding], oddities: Sequence[Oddity], origin: Origin
) -> tuple[Violation | None, tuple[Violation, ...]]:
    """The violation that needs no confirmation, if there is one, and the warnings."""
    certain = [finding for finding in findings if finding.rule.acts_alone]
    said = [violation for oddity in oddities if (violation := _of_oddity(contract, oddity, origin)) is not None]
    critical = [violation for violation in said if violation.severity == "critical"]
    if certain:
        critical.insert(0, violation_of(certain[0], origin, resolver(shapes_of(origin.leaves)), certain[1:]))
    return (critical[0] if critical else None), tuple(violation for violation in said if violation.severity == "warning")


def _of_oddity(contract: Contract, oddity: Oddity, origin: Origin) -> Violation | None:
    """None where the oddity may well be harmless: the step will tell."""
    rule = contract.first_consumer(oddity.key)
    if oddity.kind == "batch.not_finite" and (oddity.key not in contract.flowed or oddity.key in contract.handled):
        return None
    if oddity.kind == "batch.dtype":
        needs_float = rule is not None and rule.kind == "float" and not rule.recipe.casts
        if not needs_float or origin.leaves[oddity.key].is_floating_point():
            return None
    return odd_violation(oddity, origin, rule)
