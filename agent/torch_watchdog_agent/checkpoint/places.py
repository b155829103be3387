"""The names beside a checkpoint's own: while it is written, where it is not good, where a newer one takes its place.

Our word stands before the name: frameworks look for what begins with theirs (`checkpoint-*`), and would count, resume from or rotate what ends with ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

Why: TypeAlias = Literal["partial", "not-good", "replaced"]


def beside(path: Path, why: Why) -> Path:
    """`DIR/partial.NAME` for `DIR/NAME`. The coordinator names what is not good by the same rule."""
    return path.with_name(f"{why}.{path.name}")
