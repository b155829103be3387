"""Thresholds: each rule's own dataclass, with what `[rules.NAME]` in watchdog.toml changes of it.

Owns the check of such tables. Knows no rule: their classes come as arguments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Timing", "at_least", "changed", "share_of"]

_Number = TypeVar("_Number", int, float)


def at_least(least: float, default: _Number, *, most: float = math.inf) -> _Number:
    """A setting that must not be below `least`, nor above `most`: what is outside would make its rule tell everything, nothing, or fail."""
    made: _Number = field(default=default, metadata={"least": least, "most": most})
    return made


def share_of(default: float, *, least: float = 0.0) -> float:
    """A setting that is a part of a whole."""
    return at_least(least, default, most=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What every rule has: whether it is used, how long its sign must hold before it fires, how long be away before it is over."""

    enabled: bool = True
    hold_s: float = 0.0
    keep_s: float = 30.0


def changed(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """The rule's settings with these values. Raises ValueError with what was expected."""
    known = {one.name: one for one in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"has no setting {name!r}; known are {', '.join(sorted(known))}")
        _check(name, value, known[name].default)
        least, most = (known[name].metadata.get(edge, otherwise) for edge, otherwise in (("least", 0), ("most", math.inf)))
        if not least <= value <= most:
            wanted = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
            raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return cls(**values)


def _check(name: str, value: Any, default: Any) -> None:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}")  # noqa: TRY004 - all that is wrong is one kind here
    elif type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a number that is not negative, not {value!r}")
    elif isinstance(default, int) and type(value) is not int:
        raise ValueError(f"{name} must be a whole number, not {value!r}")
