"""What ranks have left in a run directory of checkpoints, good or unfinished, read from its own files: whoever writes the record may have been killed before.

Knows what the ranks' side writes (`watchdog.json`, `COMMITTED` over its hash) and nothing of what is in the parts: those were read back before COMMITTED was
written, so that here their sizes are enough.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_watchdog_proto.checkpoint_names import COMMITTED, ELSEWHERE, MANIFEST, beside

__all__ = ["newest_checkpoint", "unfinished_checkpoints"]

_MAX_LOOKED_AT = 100
_UNNAMED = "partial."
_AT_REST_S = 120.0


def newest_checkpoint(folder: Path) -> Mapping[str, Any] | None:
    """That with the most updates, as an incident names it; None where none is committed, whole and finite, or nothing can be read. One whose writer was killed
    between its COMMITTED and its name is as good. Also of those that a framework has a place of its own for."""
    found = [
        (path, manifest)
        for path in _ours(folder, ("step-", f"{_UNNAMED}step-"))[:_MAX_LOOKED_AT]
        if (manifest := _committed(path)) is not None
    ]
    for path in _elsewhere(folder):
        both = ((place, _committed(place)) for place in (path, beside(path, "partial")))
        found += [(place, manifest) for place, manifest in both if manifest is not None and manifest.get("job") == folder.parent.name]
    for path, manifest in sorted(found, key=lambda one: one[1]["updates_applied"], reverse=True):
        if _is_whole(path, manifest):
            updates, form = manifest["updates_applied"], str(manifest.get("format", ""))
            return {"path": str(path), "updates_applied": updates, "format": form, "committed": True, "finite": True}
    return None


def unfinished_checkpoints(folder: Path, *, now_s: float | None = None) -> tuple[str, ...]:
    """Of those that were being written when their writers were killed: whoever lives takes away what it could not finish. For a launch that has ended.

    `now_s`: it may have ended long ago, so that a later one may be writing into a framework's place: what was touched lately there is not told.
    """
    elsewhere = [beside(path, "partial") for path in _elsewhere(folder)]
    at_rest = [path for path in elsewhere if path.is_dir() and (now_s is None or now_s - _touched_s(path) > _AT_REST_S)]
    return tuple(sorted(str(path) for path in (*_ours(folder, (_UNNAMED,)), *at_rest) if not _is_good(path)))


def _ours(folder: Path, begins: tuple[str, ...]) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.name.startswith(begins)]
    except OSError:
        return []


def _elsewhere(folder: Path) -> list[Path]:
    """Where the frameworks' own checkpoints of that run belong, as its ranks have noted it before each of them; the newest."""
    try:
        lines = (folder.parent / ELSEWHERE).read_text(encoding="utf-8").splitlines()[-_MAX_LOOKED_AT:]
        return [Path(path) for line in lines if isinstance(path := json.loads(line), str)]
    except (OSError, ValueError, RecursionError):
        return []


def _touched_s(path: Path) -> float:
    """When anything in it was."""
    try:
        return max(one.stat().st_mtime for one in (path, *path.rglob("*")))
    except OSError:
        return math.inf  # somebody is at it


def _committed(path: Path) -> Mapping[str, Any] | None:
    try:
        written = (path / MANIFEST).read_bytes()
        committed, manifest = json.loads((path / COMMITTED).read_bytes()), json.loads(written)
        is_good = committed["manifest_sha256"] == hashlib.sha256(written).hexdigest() and manifest.get("finite", True)
        return manifest if is_good and type(manifest["updates_applied"]) is int else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_good(path: Path) -> bool:
    manifest = _committed(path)
    return manifest is not None and _is_whole(path, manifest)


def _is_whole(path: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        return all((path / part["name"]).stat().st_size == part["size"] for part in manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
