"""From findings and oddities to what the guard says: at most one violation that acts, and warnings. Owns what is certain enough; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from torch_watchdog_agent.contract.explain import odd_violation, violation_of
from torch_watchdog_agent.contract.findings import Oddity
from torch_watchdog_agent.contract.handling import makes_tensors
from torch_watchdog_agent.contract.learn import Contract
from torch_watchdog_agent.contract.misfit import another_form, mask_unlike
from torch_watchdog_agent.contract.plan import Finding
from torch_watchdog_agent.contract.replay import DOES_NOT_FIT, replayed, resolver
from torch_watchdog_agent.contract.signature import shapes_of
from torch_watchdog_agent.contract.where import Origin
from torch_watchdog_agent.errors import let_through
from torch_watchdog_proto.messages import Violation

__all__ = ["verdict"]

TAKES_TENSORS_ONLY = ("embedding", "embedding_bag", "cross_entropy", "nll_loss")  # arithmetic and `tensor[index]` take arrays, too
Leaves: TypeAlias = Mapping[str, torch.Tensor]


def verdict(
    contract: Contract, findings: Sequence[Finding], oddities: Sequence[Oddity], origin: Origin, legal: Callable[[], Leaves | None]
) -> tuple[Violation | None, tuple[Violation, ...]]:
    """The violation that needs no confirmation, if there is one, and the warnings. `legal`: what would take the place of the bad tensors."""
    certain = [
        finding for finding in findings if finding.rule.acts_alone or (finding.rule.acts_unseen and _is_unseen(finding, origin, legal()))
    ]
    said = [violation for oddity in oddities if (violation := _of_oddity(contract, oddity, origin)) is not None]
    critical = [violation for violation in said if violation.severity == "critical"]
    if certain:
        critical.insert(0, violation_of(certain[0], origin, resolver(shapes_of(origin.leaves)), certain[1:]))
    return (critical[0] if critical else None), tuple(violation for violation in said if violation.severity == "warning")


def _is_unseen(finding: Finding, origin: Origin, legal: Leaves | None) -> bool:
    """Whether the program, which looks at the data before it uses them, sees the very same as if they were legal: then it cannot mean to mend them."""
    if legal is None:
        return False
    resolve, instead = resolver(shapes_of(origin.leaves)), {**origin.leaves, **legal}
    try:
        return all(_same(replayed(look, origin.leaves, resolve), replayed(look, instead, resolve)) for look in finding.rule.looks or ())
    except DOES_NOT_FIT as error:
        let_through(error)
        return False


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def _of_oddity(contract: Contract, oddity: Oddity, origin: Origin) -> Violation | None:
    """None where the oddity may well be harmless: the step will tell."""
    if oddity.kind == "batch.shape":
        return mask_unlike(oddity.key, oddity.usual, origin)
    if oddity.kind == "batch.form":
        rule = contract.first_consumer(oddity.key) if oddity.form == "tensor" else None
        is_certain = (
            rule is not None and rule.op in TAKES_TENSORS_ONLY and rule.recipe.is_direct and rule.acts_alone and not makes_tensors()
        )
        return another_form(oddity.key, origin, rule.op, rule.place.source, repairable=True) if rule is not None and is_certain else None
    rule = contract.first_consumer(oddity.key)
    if oddity.kind == "batch.not_finite" and (oddity.key not in contract.flowed or oddity.key in contract.handled):
        return None
    if oddity.kind == "batch.dtype":
        needs_float = rule is not None and rule.kind == "float" and not rule.recipe.casts
        if not needs_float or origin.leaves[oddity.key].is_floating_point():
            return None
    return odd_violation(oddity, origin, rule)
