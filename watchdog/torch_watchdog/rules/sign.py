"""The words that rules and engine share: what a rule is, and what it sees.

Owns two dataclasses and the protocol of a rule; knows no rule in particular.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from torch_watchdog.rules.streams import View  # numpy comes with it, and who only writes an incident needs neither

__all__ = ["About", "Judge", "Rule", "Severity", "Sign"]

Severity: TypeAlias = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a person reads of a rule (`watchdog rules show NAME`). `kind` is that of its incidents."""

    name: str
    kind: str
    watches: str
    says: str
    severity: Severity = "warning"
    action: str = "an incident; the training goes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rule sees at this moment. `subject` tells it from others of the same rule and rank: a key of the batch, a GPU.

    `said` is one line with the numbers that were compared. `severity` None: the rule's own.
    """

    rank: int | None
    said: str
    cause: str
    fix: str
    step: int | None = None
    subject: str = ""
    affected: tuple[int, ...] = ()
    severity: Severity | None = None
    gpu: dict[str, Any] | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


Judge: TypeAlias = "Callable[[View, Any], Iterable[Sign]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. `settings` is its dataclass of thresholds, with `enabled`, `hold_s` and `keep_s` among them; `judge` a pure function over what was seen.

    `each_stretch`: what it sees of batches may be over before a second is, where steps are short: it looks after every few batches. So must be whoever sees
    only the newest and tells at once. `each_rank`: its signs are of single ranks; what most have in common is told as one.
    """

    about: About
    settings: type[Any]
    judge: Judge
    each_stretch: bool = False
    each_rank: bool = False
