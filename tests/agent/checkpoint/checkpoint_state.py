"""Saves and commits in the test's own process, as the only rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint import save_at
from torch_watchdog_agent.checkpoint.manifest import commit
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.subjects import Subjects

_RNG = RngState.capture()
MOMENT: dict[str, Any] = {
    "updates_applied": 2, "position": LoaderPosition(epoch=0, batches=2, rng_at_iter=None, rng=_RNG), "rng": _RNG, "rank": 0, "world_size": 1,
}  # fmt: skip


def subjects_of(optimizer: Any) -> Subjects:
    subjects = Subjects()
    subjects.optimizer_seen(optimizer)
    return subjects


def committed_here(path: Path, subjects: Subjects, *, left_out: tuple[str, ...] = ()) -> Path:
    part = save_at(path, subjects, **MOMENT, say=lambda _: None, left_out=left_out)
    files = [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in part.files]
    manifest = {"updates_applied": 2, "ranks": [0], "world_size": 1, "files": files, "finite": part.finite, "format": part.format}
    return commit(part.path, manifest, good=part.finite, ours=part.path == path)
