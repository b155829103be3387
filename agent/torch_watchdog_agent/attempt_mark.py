"""The line that parts the attempts of a launch in a rank's log: written as a later one starts, and read by who wants the words of one attempt only.

Standard library only, and little of it: it runs before torch is imported, in every rank.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["mark_attempt", "newest_attempt", "of_attempt"]

_MARK = re.compile(rb"^\[torch-watchdog\] attempt (\d+), \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\r?\n", re.MULTILINE)


def mark_attempt(path: Path, attempt: int) -> None:
    """On a line of its own: the attempt before may have ended in the middle of one. The first attempt has none. Raises OSError."""
    if attempt == 0 or not path.exists():
        return
    with path.open("rb+") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 1))
        begins = "\n" if log.read(1) not in (b"", b"\n") else ""
        log.write(f"{begins}[torch-watchdog] attempt {attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())


def newest_attempt(log: bytes) -> bytes:
    """What lies behind the last mark; all of it where there is none."""
    marks = list(_MARK.finditer(log))
    return log[marks[-1].end() :] if marks else log


def of_attempt(log: bytes, attempt: int) -> bytes:
    """What that attempt has written, without its mark. `log` may be the end of a file: then nothing of an attempt that lies before that."""
    marks = list(_MARK.finditer(log))
    if not marks:
        return log
    ends = [*(mark.start() for mark in marks), len(log)]
    numbers = [int(mark[1]) for mark in marks]
    if attempt < numbers[0]:
        return log[: ends[0]] if attempt == numbers[0] - 1 else b""
    if attempt not in numbers:
        return b""
    at = numbers.index(attempt)
    return log[marks[at].end() : ends[at + 1]]
