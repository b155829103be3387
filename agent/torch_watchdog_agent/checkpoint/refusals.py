"""Why the system took no more of a file: its error number, in words that say what to do.

Owns which numbers are told, and where they are looked for: torch's writer raises an error of its own over the system's (`unexpected pos 704 vs 598`), or
drops it. What a disk says of its room is `save.py`'s.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["by_trying", "is_named", "refusal"]

# Python's own errors, and those of libraries in Rust (safetensors).
_NUMBERED = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
_NO_LIMIT = -1


def _too_large() -> str:
    limit = _largest_file()
    if limit == _NO_LIMIT:
        return "the file system takes no file so large: write to another one (--dir), or from more ranks"
    return f"a file may have {limit:,} bytes in this process (RLIMIT_FSIZE): raise that where the launch begins (`ulimit -f unlimited`)"


_WORDS: Mapping[int, Callable[[], str]] = {
    errno.ENOSPC: lambda: "no room is left (`df`, and `df -i` for the number of files): make some, or write elsewhere (--dir)",
    errno.EDQUOT: lambda: "the quota is used up (`quota`): make room, or write elsewhere (--dir)",
    errno.EFBIG: _too_large,
    errno.EROFS: lambda: (
        "the file system is read-only (the kernel makes it so after an error of the disk: `dmesg`): write elsewhere (--dir)"
    ),
    errno.EIO: lambda: "the disk, or the server behind it, failed (`dmesg`): write elsewhere (--dir)",
    errno.ESTALE: lambda: "the file server knows the folder no more (removed, or served anew): mount it again, or write elsewhere (--dir)",
}


def refusal(error: BaseException) -> str:
    """What the system said no to, and its own words; empty where nothing of the kind lies behind the error."""
    for one in _chain(error):
        number = one.errno if isinstance(one, OSError) else _numbered(str(one))
        if number is not None and number in _WORDS:
            first_line = next(iter(str(one).strip().splitlines()), "")
            return f"{_WORDS[number]()} ({type(one).__name__}: {first_line})"
    return ""


def is_named(text: str) -> bool:
    """Whether an error of the system's is in these words."""
    return _numbered(text) is not None


def by_trying(folder: Path, size: int) -> str:
    """The same, of an error that names no number: a file of `size` bytes is written into `folder`, and what lies there is looked at."""
    limit = _largest_file()
    with suppress(OSError):
        if limit != _NO_LIMIT and any(path.stat().st_size >= limit for path in folder.rglob("*") if path.is_file()):
            return _too_large()
    probe = folder / ".probe"
    try:
        with probe.open("wb") as stream:
            stream.write(bytes(size))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return refusal(error)
    finally:
        with suppress(OSError):
            probe.unlink()
    return ""


def _largest_file() -> int:
    """In bytes: what this process may write; -1 where nothing limits it."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return _NO_LIMIT if limit == resource.RLIM_INFINITY else limit


def _numbered(text: str) -> int | None:
    found = _NUMBERED.search(text)
    return None if found is None else int(found[1] or found[2])


def _chain(error: BaseException) -> Iterator[BaseException]:
    """What was raised, and behind it what that was raised over."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
