"""One rank's part of a checkpoint: the words that all ways of writing one share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch_watchdog_agent.checkpoint.files import sync
from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_proto.messages import SavedFile

Reader: TypeAlias = Callable[[Any], Any]  # a value of the state, however nested, without tensors on a device


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What every rank knows of one rank's part, once all are written."""

    rank: int
    updates_applied: int
    finite: bool
    files: tuple[SavedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """What this rank wrote, read back and digested. `path`: the name that the whole will have; until then it lies beside it, as `partial.NAME`.

    `finite`: no NaN or infinity in anything that this rank holds. `of_all`: the parts of all ranks, where they wrote together.
    """

    path: Path
    files: tuple[SavedFile, ...]
    finite: bool
    format: str
    not_covered: tuple[str, ...] = ()
    of_all: tuple[RankPart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """This rank writes by itself what all would have written together: no collective can be run any more.

    `steps`: how many the loop had ended by then, those that were left out and those before this launch included; `begun`: how many it has begun since.
    """

    steps: int
    begun: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When the checkpoint is taken: the place in the data, and the generators as they are. `is_piece`: other ranks write the other shards by themselves.

    `alone`: None where all ranks write together.
    """

    updates_applied: int
    position: LoaderPosition
    rng: RngState
    say: Callable[[str], None]
    is_piece: bool = False
    read: Reader | None = None  # brings every tensor to the host first; None: the writer takes them from where they are
    alone: Alone | None = None

    def on_host(self, value: Any) -> Any:
        """A value of the state, without tensors on a device."""
        return value if self.read is None else self.read(value)


def empty_folder(directory: Path) -> None:
    """Make the folder anew: what an earlier attempt left half written must not become part of this checkpoint."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    sync(directory.parent)
