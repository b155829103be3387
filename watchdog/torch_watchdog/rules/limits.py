"""The numbers of what is always watched, of which `[rules.NAME]` in watchdog.toml may change those that depend on a site or a training.

Owns their defaults. The judgement is in job/hangs.py, job/losses.py and, for sizes, in the rank. What has no number here has none to choose: an index is
outside of its table or is not, a rank has ended or has not. No numpy: every launch reads these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch_watchdog.rules.settings import at_least, changed, share_of

__all__ = ["LIMITS", "HangLimits", "LossLimits", "SizeLimits", "limits_of"]

_Limits = TypeVar("_Limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """A standstill is unusual after `shortest_s`, `steps` times the median of this job's newest 64 steps, and `longest` times the longest of them: all must
    have passed. A rank that may still be at work counts as hung once `of_timeout` of its process groups' own timeout has."""

    shortest_s: float = at_least(5, 10.0)
    steps: float = at_least(2, 10.0)
    longest: float = at_least(1, 2.0)
    of_timeout: float = share_of(0.8, least=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLimits:
    """Under a GradScaler so many losses `in_a_row` must be NaN or infinite: it skips what overflows, and finds a lower scale, once or twice as a rule."""

    in_a_row: int = at_least(1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimits:
    """Fires where a tensor of a batch has `times` the elements of the largest so far, from the eleventh batch and 4,096 elements on."""

    times: float = at_least(2, 10.0)


LIMITS: Mapping[str, type[Any]] = {"hang": HangLimits, "loss_not_finite": LossLimits, "size_outlier": SizeLimits}


def limits_of(cls: type[_Limits], changes: Mapping[str, Any]) -> _Limits:
    """With what `[rules]` changes. Where that is not what it must be, unchanged: it was checked where it was written, and what is watched must be watched."""
    name = next(name for name, one in LIMITS.items() if one is cls)
    try:
        return changed(cls, changes.get(name, {}))  # type: ignore[no-any-return]
    except (ValueError, TypeError, AttributeError):
        return cls()
