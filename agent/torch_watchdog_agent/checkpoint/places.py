"""Where a checkpoint lies that a framework has a place of its own for, noted in the run directory for whoever looks for it later."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from torch_watchdog_proto.checkpoint_names import ELSEWHERE

_OURS = "checkpoints"


def note_elsewhere(path: Path, ours: Path) -> None:
    """Before it is written: `path`, where it belongs, is not the place that this launch had for it, `ours`. Who is killed over it leaves what nobody finds."""
    run_dir, line = ours.parent.parent, f"{json.dumps(str(path))}\n"
    if path.parent == ours.parent or not ours.is_absolute() or ours.parent.name != _OURS:
        return
    with suppress(OSError), (run_dir / ELSEWHERE).open("a+", encoding="utf-8") as noted:
        noted.seek(0)
        if line not in noted.readlines():
            noted.write(line)
