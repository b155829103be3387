"""What ranks have left in a run directory of checkpoints, good or unfinished, read from its own files: whoever writes the record may have been killed before.

Knows what the ranks' side writes (`watchdog.json`, `COMMITTED` over its hash) and nothing of what is in the parts: those were read back before COMMITTED was
written, so that here their sizes are enough.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["newest_checkpoint", "unfinished_checkpoints"]

_MANIFEST, _COMMITTED = "watchdog.json", "COMMITTED"
_MAX_LOOKED_AT = 100
_UNNAMED = "partial."


def newest_checkpoint(folder: Path) -> Mapping[str, Any] | None:
    """That with the most updates, as an incident names it; None where none is committed, whole and finite, or nothing can be read. One whose writer was killed
    between its COMMITTED and its name is as good."""
    try:
        paths = [path for path in folder.iterdir() if path.name.startswith(("step-", f"{_UNNAMED}step-"))][:_MAX_LOOKED_AT]
    except OSError:
        return None
    found = [(path, manifest) for path in paths if (manifest := _committed(path)) is not None]
    for path, manifest in sorted(found, key=lambda one: one[1]["updates_applied"], reverse=True):
        if _is_whole(path, manifest):
            updates, form = manifest["updates_applied"], str(manifest.get("format", ""))
            return {"path": str(path), "updates_applied": updates, "format": form, "committed": True, "finite": True}
    return None


def unfinished_checkpoints(folder: Path) -> tuple[str, ...]:
    """Of those that were being written when their writers were killed: whoever lives takes away what it could not finish. For a launch that has ended."""
    try:
        return tuple(sorted(str(path) for path in folder.iterdir() if path.name.startswith(_UNNAMED) and not _is_good(path)))
    except OSError:
        return ()


def _committed(path: Path) -> Mapping[str, Any] | None:
    try:
        written = (path / _MANIFEST).read_bytes()
        committed, manifest = json.loads((path / _COMMITTED).read_bytes()), json.loads(written)
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
