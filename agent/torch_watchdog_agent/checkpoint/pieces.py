"""A whole checkpoint out of pieces that ranks write without a word between them: for a rescue, where no collective can be run any more.

Owns where a piece lies until all are there, and the one list of them that torch reads. In the end the folder is as `dcp.py` would have written it together.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import shutil
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_watchdog_agent.checkpoint.errors import CheckpointError
from torch_watchdog_agent.checkpoint.files import digested, sync
from torch_watchdog_agent.checkpoint.part import SavedPart
from torch_watchdog_proto.checkpoint_names import beside

__all__ = ["PiecePlanner", "folder_of", "join", "lifted", "swept"]

_METADATA = ".metadata"


class PiecePlanner(DefaultSavePlanner):  # type: ignore[misc]
    """Plans what is here, and does not ask for what is not: torch's own refuses a tensor whose other shards nobody writes."""

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Metadata]:
        self.global_plan, metadata = create_default_global_save_plan(all_plans)
        self.metadata = replace(metadata, planner_data=dict(ChainMap(*(plan.planner_data for plan in all_plans))))
        return self.global_plan, self.metadata


def folder_of(path: Path, part: int) -> Path:
    """What a piece of the checkpoint at `path` is written as, by the rules of `places.py`."""
    return beside(path, "partial") / f"part-{part}"


def lifted(piece: SavedPart, path: Path, part: int) -> SavedPart:
    """The piece's files beside those of the others, under names of their own; torch's list of them stays behind until all are joined."""
    written, directory = beside(piece.path, "partial"), beside(path, "partial")
    files = []
    for file in piece.files:
        if file.name != _METADATA:
            name = _renamed(file.name, part)
            (written / file.name).rename(directory / name)
            files.append(replace(file, name=name))
    sync(directory)
    return replace(piece, path=path, files=tuple(files))


def join(path: Path, manifest: Mapping[str, Any], *, parts: int) -> dict[str, Any]:
    """One list of all pieces; the manifest with it. Raises CheckpointError where the pieces are not a whole.

    Nothing that another rank needs to do the same goes with it: whoever seals may die before it has.
    """
    directory = beside(path, "partial")
    lists = [torch_dcp.FileSystemReader(beside(folder_of(path, part), "partial")).read_metadata() for part in range(parts)]
    whole = _whole(lists)
    with (directory / _METADATA).open("wb") as file:
        pickle.dump(whole, file)
    sync(directory / _METADATA)
    named = {file["name"] for file in manifest["files"]} | {_METADATA}
    for left in directory.iterdir():  # of an attempt that came to nothing
        if left.name not in named and left.name.startswith(("__", "rank-")):
            left.unlink()
    return {**manifest, "files": [*manifest["files"], dataclasses.asdict(digested(directory, _METADATA))]}


def swept(path: Path) -> None:
    """The whole has its name: the lists of its pieces are needed no more."""
    for left in (found for place in (path, beside(path, "not-good")) for found in place.glob(f"{beside(Path('part-'), 'partial')}*")):
        shutil.rmtree(left, ignore_errors=True)


def _renamed(name: str, part: int) -> str:
    """Each piece's writer takes itself for the first of all."""
    return f"__{part}_{name.removeprefix('__0_')}" if name.startswith("__0_") else name


def _whole(lists: list[Metadata]) -> Metadata:
    """What several pieces hold, as a scheduler's state, is taken from the first of them."""
    entries: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for part, one in enumerate(lists):
        for name, entry in one.state_dict_metadata.items():
            entries[name] = _with_chunks(entries.get(name), entry)
        for index, place in (one.storage_data or {}).items():
            stored.setdefault(index, replace(place, relative_path=_renamed(place.relative_path, part)))
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise CheckpointError(f"the pieces of {name} are not the whole of it")
    return replace(lists[0], state_dict_metadata=entries, storage_data=stored)


def _with_chunks(known: Any, entry: Any) -> Any:
    if not isinstance(entry, TensorStorageMetadata) or known is None:
        return entry if known is None else known
    there = {tuple(chunk.offsets) for chunk in known.chunks}
    return replace(known, chunks=[*known.chunks, *(chunk for chunk in entry.chunks if tuple(chunk.offsets) not in there)])
