"""Thresholds: each rule's own dataclass, with what `[rules.NAME]` in watchdog.toml changes of it.

Owns the check of such tables. Knows no rule: their classes come as arguments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Timing", "changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What every rule has: whether it is used, how long its sign must hold before it fires, how long be away before it is over."""

    enabled: bool = True
    hold_s: float = 0.0
    keep_s: float = 30.0


def changed(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """The rule's settings with these values. Raises ValueError with what was expected."""
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"has no setting {name!r}; known are {', '.join(sorted(known))}")
        _check(name, value, known[name].default)
        if (least := known[name].metadata.get("least", 0)) > value:
            raise ValueError(f"{name} must be at least {least}, not {value!r}")
    return cls(**values)


def _check(name: str, value: Any, default: Any) -> None:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}")  # noqa: TRY004 - all that is wrong is one kind here
    elif type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a number that is not negative, not {value!r}")
    elif isinstance(default, int) and type(value) is not int:
        raise ValueError(f"{name} must be a whole number, not {value!r}")
