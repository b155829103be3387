"""One rank's part of a checkpoint: the words that both ways of writing one share."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from torch_watchdog_agent.checkpoint.files import sync
from torch_watchdog_proto.messages import SavedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """What this rank wrote, read back and digested. `finite`: no NaN or infinity in anything that this rank holds."""

    files: tuple[SavedFile, ...]
    finite: bool
    format: str
    not_covered: tuple[str, ...] = ()


def empty_folder(directory: Path) -> None:
    """Make the folder anew: what an earlier attempt left half written must not become part of this checkpoint."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    sync(directory.parent)
