"""From written parts to a checkpoint that may be called good: manifest, final name, COMMITTED, rotation; and the way back: is it whole.

Owns the names in a folder of checkpoints: `partial.step-S` while it is written, `step-S` once it is whole, `not-good.step-S` where it holds
NaN or infinity. COMMITTED is written last and removed first, so that a folder that has it is whole; the good name comes after it. Imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_watchdog_agent.checkpoint.errors import CheckpointError, RestoreError
from torch_watchdog_agent.checkpoint.files import lies_in, sha256, sync, write_json
from torch_watchdog_agent.quarantine import FILE_NAME as QUARANTINE
from torch_watchdog_proto.checkpoint_names import COMMITTED, MANIFEST, beside

OUR_WORDS = frozenset({MANIFEST, COMMITTED, QUARANTINE})  # in a folder whose other files a framework has written
KEPT = 3

_FINISHED = re.compile(r"(?:replaced\.|not-good\.)?step-(\d+)")
_PARTIAL = re.compile(r"partial\.step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One finished folder. `good`: it has COMMITTED."""

    path: Path
    updates_applied: int
    good: bool


def commit(final: Path, manifest: Mapping[str, Any], *, good: bool, ours: bool = True) -> Path:
    """Give the written parts their final name; the lowest saver's work. Returns the final path.

    `manifest["files"]` lists every part as {name, size, sha256}. Raises CheckpointError, and commits nothing, where a part is missing or
    has another size. A checkpoint that is not good never takes the name of a good one. `ours`: the folder around it is, so older ones go.
    """
    partial = beside(final, "partial")
    _refuse_missing(partial, manifest["files"])
    write_json(partial / MANIFEST, {**_defaults(manifest), **manifest, "good": good})
    if good:
        write_json(partial / COMMITTED, {"manifest_sha256": sha256(partial / MANIFEST)})
    sync(partial)
    place = final if good else beside(final, "not-good")
    session = manifest.get("session")
    aside = _step_aside(place, session, ours=ours) if place.exists() else None
    partial.rename(place)
    sync(place.parent)
    if aside is not None and _may_go(aside, place, session, ours=ours):
        remove(aside)
    if ours:
        rotate(place.parent, just_made=place)
    return place


def _may_go(path: Path, place: Path, session: str | None, *, ours: bool) -> bool:
    """One of the same step. What a framework wrote, or another launch in a folder of the user's, stays, unless all of it lies in the new one."""
    if lies_in(path, place, but=OUR_WORDS):
        return True
    if ours:
        return (path / MANIFEST).exists()
    try:
        return _object(path, MANIFEST).get("session") == session
    except RestoreError:
        return False


def _step_aside(place: Path, session: str | None, *, ours: bool) -> Path:
    """A job that was resumed may stop at the same step again: the folder that is there stays what it is until the new one is there."""
    aside = beside(place, "replaced")
    if aside.exists():
        aside = aside if _may_go(aside, place, session, ours=ours) else aside.with_name(f"{aside.name}.{time.time_ns()}")
        shutil.rmtree(aside, ignore_errors=True)
    place.rename(aside)
    return aside


def newest_committed(checkpoints_dir: Path) -> Path | None:
    """The good checkpoint with the most updates, or None."""
    good = [checkpoint for checkpoint in finished(checkpoints_dir) if checkpoint.good]
    return good[-1].path if good else None


def finished(checkpoints_dir: Path) -> list[Checkpoint]:
    """Every finished checkpoint, good or not, by the number of updates; a half-written one is none."""
    if not checkpoints_dir.is_dir():
        return []
    found = [
        (path, match) for path in checkpoints_dir.iterdir() if (match := _FINISHED.fullmatch(path.name)) and (path / MANIFEST).exists()
    ]
    all_of_them = [
        Checkpoint(path=path, updates_applied=_updates_of(path, named=int(match[1])), good=(path / COMMITTED).exists())
        for path, match in found
    ]
    # Of two with equal updates the plain name is the newer one, and shorter: it must come last.
    return sorted(all_of_them, key=lambda checkpoint: (checkpoint.updates_applied, -len(checkpoint.path.name)))


def _updates_of(path: Path, *, named: int) -> int:
    """By its manifest: a stop names the folder by the step of its own attempt, which may have resumed."""
    try:
        return int(json.loads((path / MANIFEST).read_text())["updates_applied"])
    except (OSError, ValueError, KeyError, TypeError):
        return named


def rotate(checkpoints_dir: Path, *, just_made: Path) -> None:
    """Remove all but the newest KEPT, never the newest good one nor the one that was just made (an attempt that began anew has fewer updates than
    the one before it); and what older attempts left half written.
    """
    ordered = finished(checkpoints_dir)
    good = [checkpoint for checkpoint in ordered if checkpoint.good]
    keep = {checkpoint.path for checkpoint in (*ordered[-KEPT:], *good[-1:])} | {just_made}
    for checkpoint in ordered:
        if checkpoint.path not in keep:
            remove(checkpoint.path)
    for path in checkpoints_dir.iterdir():
        match = _PARTIAL.fullmatch(path.name)
        if match and ordered and int(match[1]) < ordered[-1].updates_applied:
            remove(path)


def remove(path: Path) -> None:
    """COMMITTED goes first: a folder that is half removed must not be taken for a good one."""
    (path / COMMITTED).unlink(missing_ok=True)
    sync(path)
    shutil.rmtree(path, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a good checkpoint; a RestoreError for anything else."""
    if not path.is_dir():
        raise RestoreError(path, "there is no such folder", "Name a folder `step-N` under the run's checkpoints/")
    if not (path / MANIFEST).exists():
        raise RestoreError(path, f"it has no {MANIFEST}: it was never finished", _take_older(path))
    manifest = _object(path, MANIFEST)
    if not manifest.get("finite", True):
        raise RestoreError(path, "it was saved with NaN or infinity in it and is kept for looking at only", _take_older(path))
    if not (path / COMMITTED).exists():
        raise RestoreError(path, f"it has no {COMMITTED}: not every part was written and verified", _take_older(path))
    if _object(path, COMMITTED).get("manifest_sha256") != sha256(path / MANIFEST):
        raise RestoreError(path, f"its {MANIFEST} is not the one that was committed", _take_older(path))
    return manifest


def _object(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((path / name).read_text())
    except (OSError, ValueError) as error:
        raise RestoreError(path, f"{name} cannot be read ({error})", _take_older(path)) from error
    if not isinstance(found, dict):
        raise RestoreError(path, f"{name} is not what was written", _take_older(path))
    return found


def is_good_of(path: Path, *, session: str, attempt: int, updates_applied: int) -> bool:
    """Whether a good checkpoint of that attempt of a launch stands there, after so many updates."""
    try:
        found = read_manifest(path)
    except (RestoreError, OSError):
        return False
    return (found.get("session"), found.get("attempt"), found.get("updates_applied")) == (session, attempt, updates_applied)


def verify(path: Path) -> dict[str, Any]:
    """The manifest, once every file of it is there with the right size and digest; a RestoreError names the first that is not."""
    manifest = read_manifest(path)
    verify_files(path, manifest["files"])
    return manifest


def verify_files(path: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Each of `files` is there with the size and digest that it was written with."""
    for file in files:
        part = path / file["name"]
        if not part.is_file():
            raise RestoreError(path, f"{file['name']} is missing", _take_older(path))
        if part.stat().st_size != file["size"]:
            raise RestoreError(path, f"{file['name']} has {part.stat().st_size} bytes, {file['size']} were written", _take_older(path))
        if sha256(part) != file["sha256"]:
            raise RestoreError(path, f"{file['name']} is not what was written (its digest differs)", _take_older(path))


def _take_older(path: Path) -> str:
    others = [checkpoint.path for checkpoint in finished(path.parent) if checkpoint.good and checkpoint.path != path]
    return f"Resume from {others[-1]} instead" if others else "There is no other good checkpoint beside it: start from your own last one"


def _refuse_missing(partial: Path, files: Sequence[Mapping[str, Any]]) -> None:
    for file in files:
        part = partial / file["name"]
        size = part.stat().st_size if part.is_file() else None
        if size != file["size"]:
            found = "is not there" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"not committed: {part} {found}, its rank wrote {file['size']} bytes; is the run directory shared by all nodes?"
            )


def _defaults(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": manifest["updates_applied"],
        "time_ns": time.time_ns(),
        "versions": {"torch": _version("torch"), "torch_watchdog": _version("torch-watchdog"), "python": platform.python_version()},
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
