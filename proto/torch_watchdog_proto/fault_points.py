"""Places between two messages of the stop protocol at which a test may let a process die by SIGKILL, as a machine would take it away.

Owns one environment variable, read once: `rank-1 before Ack`, `rank-0 got Commit`, `node got Hold`, `node before Commit`, `daemon before Prepare`.
Where it is not set a point costs one look at a flag. Nothing but a test sets it.
"""

from __future__ import annotations

import os
import signal

__all__ = ["VARIABLE", "reach"]

VARIABLE = "TORCH_WATCHDOG_DIES_AT"
_DIES_AT = os.environ.get(VARIABLE, "")


def reach(who: str, when: str, word: object) -> None:
    """`who` is about to say `word` (before), or has just been told it (got)."""
    if _DIES_AT and f"{who} {when} {type(word).__name__}" == _DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)
