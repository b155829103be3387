"""Who gave which order to which job: `audit.jsonl` beside the run directories, a line for each, refused ones too.

Owns the file's form. Written by the store's thread, appended, for this user only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from torch_watchdog.daemon.journal import printable
from torch_watchdog.store.background import BackgroundWriter

__all__ = ["Audit"]


class Audit:
    """`who` is the name of the token that was brought, which is proven; `says` is who the caller says it is, which is not."""

    def __init__(self, file: Path | None, *, writer: BackgroundWriter, now: Callable[[], float], say: Callable[[str], None]) -> None:
        self._file, self._writer, self._now, self._say = file, writer, now, say

    def note(self, what: str, target: str, *, who: str, says: str, accepted: bool, reason: str = "") -> None:
        """Nothing where no file is kept."""
        if self._file is None:
            return
        time = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time,
            "what": what,
            "of": target[:200],
            "who": who,
            "says": says[:200],
            "accepted": accepted,
            "reason": reason[:1000],
        }
        self._writer.submit(lambda: self._append(json.dumps(line)))
        told = printable(f"{what} of {target[:120]} by {who} ({says[:80]})", 400)
        self._say(f"{told}: {'accepted' if accepted else 'refused'}")

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
