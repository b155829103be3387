"""Which hooks have turned themselves off, and whether this rank can still say what it has trained.

Owns that list, for the whole process. A hook that is off hears nothing any more: a number that it has kept stands still and is wrong from then on.
"""

from __future__ import annotations

__all__ = ["is_off", "turned_off", "why_unknown"]

# What updates, windows and a checkpoint's contents hang on.
_COUNTING = ("loader", "boundary", "hand-over", "optimizer", "step", "scaler", "scheduler")
_off: set[str] = set()


def turned_off(name: str) -> None:
    """After a failure of ours."""
    _off.add(name)


def is_off(name: str) -> bool:
    """Whether that hook has turned itself off after a failure of ours."""
    return name in _off


def why_unknown() -> str:
    """Why this rank does not know any more how many updates it has made, or with what; or nothing. It must promise and save nothing then."""
    for name in _COUNTING:
        if is_off(name):
            return f"its {name} hook had turned itself off, and what it has trained since is not known"
    return ""
