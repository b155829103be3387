"""The folders of one launch: sockets in a private runtime folder, rings in memory; and the sweep of what dead launches left.

Owns paths, modes and locks. A launch holds a lock on each of its folders for as long as it lives, so a folder whose lock is free has no
owner, whatever process ids say. It must not know what the files in there mean.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["find_in_runtime_dir", "here", "is_held", "make_private", "open_ring_dir", "open_runtime_dir"]

MAX_RUNTIME_PATH = 70  # a unix socket's path ends at 107 bytes, and names of sockets are still to come
MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory, not a place for temporary files
_LOCK = ".lock"


def here() -> str:
    """The folder that paths are shown relative to; the root where it has been removed meanwhile."""
    try:
        return str(Path.cwd())
    except OSError:
        return "/"


@contextmanager
def open_runtime_dir(session: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """A new folder of mode 0700 with a short path, gone at the end. Raises OSError."""
    with _open_private(session, _runtime_parents(environment)) as path:
        yield path


def find_in_runtime_dir(session: str, name: str, environment: Mapping[str, str]) -> str | None:
    """What a live process of this user keeps in the file `name` of its runtime folder; None where there is none, or others could have put it there."""
    for parent in _runtime_parents(environment):
        base = _base(parent)
        with suppress(OSError, UnicodeDecodeError):
            if _is_private(base) and _is_owned(base / session):
                return (base / session / name).read_text(encoding="utf-8")
    return None


def is_held(session: str, environment: Mapping[str, str]) -> bool:
    """Whether the launch of that session lives, on this machine and by this user."""
    for parent in (MEMORY, *_runtime_parents(environment)):
        with suppress(OSError):
            if _is_owned(_base(parent) / session):
                return True
    return False


def _is_owned(path: Path) -> bool:
    """Whether whoever made the folder is alive."""
    try:
        os.close(_open_locked(path / _LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    return False


def _runtime_parents(environment: Mapping[str, str]) -> list[Path]:
    given = [Path(environment[name]) for name in ("XDG_RUNTIME_DIR", "TMPDIR") if environment.get(name)]
    return [*given, Path("/tmp"), Path(tempfile.gettempdir())]  # noqa: S108 - mode 0700, owner checked


@contextmanager
def open_ring_dir(session: str) -> Iterator[Path]:
    """Like the runtime folder, in shared memory. Raises OSError where there is none to write to."""
    with _open_private(session, [MEMORY]) as path:
        yield path


@contextmanager
def _open_private(session: str, parents: list[Path]) -> Iterator[Path]:
    path, lock = _create_first(session, parents)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _create_first(session: str, parents: list[Path]) -> tuple[Path, int]:
    """In the first parent that takes it; the error of the last where none does."""
    problem = OSError("no folder to write to")
    for parent in parents:
        try:
            return _create(session, parent)
        except OSError as error:
            problem = error
    raise problem


def _create(session: str, parent: Path) -> tuple[Path, int]:
    base = _base(parent)
    make_private(base)
    path = base / session
    if len(os.fsencode(path)) > MAX_RUNTIME_PATH:
        raise OSError(f"{path} is too long for a unix socket")
    gate = _open_locked(base / _LOCK, fcntl.LOCK_EX)  # nobody sweeps between our mkdir and our lock
    try:
        _sweep(base)
        path.mkdir(mode=0o700)
        return path, _open_locked(path / _LOCK, fcntl.LOCK_EX)
    finally:
        os.close(gate)


def make_private(folder: Path, *, parents: bool = False) -> None:
    """Ours alone: in a folder that all can write to, somebody may have made it before us. Raises OSError."""
    folder.mkdir(mode=0o700, parents=parents, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not a folder that only this user can enter")


def _base(parent: Path) -> Path:
    return parent / f"torch-watchdog-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _open_locked(path: Path, operation: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, operation)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(base: Path) -> None:
    """Removes the folders whose launch is dead. Ranks that outlived it keep what they have mapped."""
    for path in base.iterdir():
        if path.is_dir():
            try:
                lock = _open_locked(path / _LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
