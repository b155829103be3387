"""The names in a folder of checkpoints and beside a checkpoint's own, for whoever writes them and whoever finds them later. Pure.

Our word stands before the name: frameworks look for what begins with theirs (`checkpoint-*`), and would count, resume from or rotate what ends with ours.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, TypeAlias, TypeVar

__all__ = ["COMMITTED", "ELSEWHERE", "MANIFEST", "Why", "beside"]

MANIFEST = "watchdog.json"
COMMITTED = "COMMITTED"  # over the manifest's hash, written last: what has it is whole
ELSEWHERE = "saved-elsewhere.jsonl"  # in the run directory: a line for each checkpoint that a framework has a place of its own for

Why: TypeAlias = Literal["partial", "not-good", "replaced"]
_P = TypeVar("_P", bound=PurePath)


def beside(path: _P, why: Why) -> _P:
    """`DIR/partial.NAME` for `DIR/NAME`: while it is written, where it is not good, where a newer one takes its place."""
    return path.with_name(f"{why}.{path.name}")
