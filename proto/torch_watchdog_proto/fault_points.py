"""Places between two messages of the stop protocol at which a test may let a process die by SIGKILL, as a machine would take it away.

Owns one environment variable, read once: `rank-1 before Ack`, `rank-0 got Commit`, `node got Hold`, `node before Commit`, `daemon before Prepare`, or
`keeper-of-rank-1 got Commit` for the process before the rank. Only in the first attempt of a launch. Where it is not set a point costs one look at a flag.
A second variable names a file that tells, once it is there, that the point was reached. Nothing but a test sets them.
"""

from __future__ import annotations

import os
import signal

__all__ = ["MARK", "VARIABLE", "reach"]

VARIABLE, MARK = "TORCH_WATCHDOG_DIES_AT", "TORCH_WATCHDOG_DIED_AT"
_DIES_AT = os.environ.get(VARIABLE, "") if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" else ""


def reach(who: str, when: str, word: object) -> None:
    """`who` is about to say `word` (before), or has just been told it (got)."""
    if not _DIES_AT:
        return
    here = f"{who} {when} {type(word).__name__}"
    if here == _DIES_AT:
        _kill(os.getpid())
    elif f"keeper-of-{here}" == _DIES_AT:
        _kill(os.getppid())


def _kill(pid: int) -> None:
    mark = os.environ.get(MARK)
    if mark:
        os.close(os.open(mark, os.O_CREAT | os.O_WRONLY, 0o600))
    os.kill(pid, signal.SIGKILL)
