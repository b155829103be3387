"""One line for the person at the terminal, on stderr, so that the command's stdout stays byte for byte its own."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["PREFIX", "say"]

PREFIX = "[torch-watchdog]"


def say(line: str) -> None:
    """A terminal that is gone is no reason to fail; nor is one that never was (`2>&-`)."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{PREFIX} {line}\n")
        sys.stderr.flush()
