"""The names beside a checkpoint's own: while it is written, where it is not good, where a newer one takes its place.

Our word stands before the name: frameworks look for what begins with theirs (`checkpoint-*`), and would count, resume from or rotate what ends with ours.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

ELSEWHERE = "saved-elsewhere.jsonl"  # in the run directory: a line for each checkpoint that a framework has a place of its own for
_OURS = "checkpoints"

Why: TypeAlias = Literal["partial", "not-good", "replaced"]


def beside(path: Path, why: Why) -> Path:
    """`DIR/partial.NAME` for `DIR/NAME`. The coordinator names what is not good by the same rule."""
    return path.with_name(f"{why}.{path.name}")


def note_elsewhere(path: Path, ours: Path) -> None:
    """Before it is written: `path`, where it belongs, is not the place that this launch had for it, `ours`. Who is killed over it leaves what nobody finds."""
    run_dir, line = ours.parent.parent, f"{json.dumps(str(path))}\n"
    if path.parent == ours.parent or not ours.is_absolute() or ours.parent.name != _OURS:
        return
    with suppress(OSError), (run_dir / ELSEWHERE).open("a+", encoding="utf-8") as noted:
        noted.seek(0)
        if line not in noted.readlines():
            noted.write(line)
