"""Files that must be whole after a crash: written, flushed to the disk, digested by reading them back."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_watchdog_proto.messages import SavedFile

_READ_BYTES = 1 << 20


def sync(path: Path) -> None:
    """Flush a file or a folder (its names) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write under a temporary name, flush, rename: the name never shows half a file."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def link_all(source: Path, target: Path, *, but: frozenset[str]) -> None:
    """The files of `source` under the same names in `target`, which is there: each of them once on the disk, where the disk can do that. `but`: names."""
    shutil.copytree(source, target, copy_function=_link, ignore=shutil.ignore_patterns(*but), dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def lies_in(folder: Path, other: Path, *, but: frozenset[str]) -> bool:
    """Whether each file of `folder` is one of `other`'s by the same name: not one like it, the very same."""
    try:
        return all(
            (other / path.relative_to(folder)).samefile(path) for path in folder.rglob("*") if path.is_file() and path.name not in but
        )
    except OSError:
        return False


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def digested(directory: Path, name: str) -> SavedFile:
    """Name, size and digest of one file, as they are on the disk."""
    path = directory / name
    return SavedFile(name=name, size=path.stat().st_size, sha256=sha256(path))
