"""Workers of a data loader that have died while the loop still needs them: by a rank's own error that is not always told, or is told as another one.

Owns the question and torch's own words for the answer. A worker that raises lives, and hands its error on.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from torch_watchdog_agent.errors import text_of

__all__ = ["TORCHS_WORD", "dead_workers", "unheard_children"]

TORCHS_WORD = "DataLoader worker (pid"
WAIT_S = 1.0  # for the end of one whose connection is gone already
POLL_S = 0.01
_LOADER = "torch.utils.data.dataloader"
_SAID = re.compile(rf"{re.escape(TORCHS_WORD)}.*")


def dead_workers(error: BaseException) -> str:
    """In torch's words; empty where none has died. Waits a moment where the error came out of a loader that has workers."""
    out_of_a_loader, said = _came_out_of_a_loader(error), _SAID.search(text_of(error))
    if not (out_of_a_loader or said or _has_lost_a_child()):
        return ""
    from torch_watchdog_agent.living import instances

    workers = [
        worker
        for iterator in instances(_LOADER, "_MultiProcessingDataLoaderIter")
        if not getattr(iterator, "_shutdown", True)
        for worker in getattr(iterator, "_workers", ())
    ]
    deadline = time.monotonic() + (WAIT_S if out_of_a_loader else 0.0)
    while not (dead := [worker for worker in workers if worker.exitcode is not None]) and workers and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return _words(dead[0]) if dead else said[0] if said else ""


@contextmanager
def unheard_children() -> Iterator[None]:
    """A failure is told: torch's handler, which raises where a worker of a loader dies, is not to break into that."""
    theirs = signal.getsignal(signal.SIGCHLD)
    if not callable(theirs):
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, theirs)


def _words(worker: Any) -> str:
    if worker.exitcode < 0:
        return f"DataLoader worker (pid {worker.pid}) is killed by signal: {signal.strsignal(-worker.exitcode)}"
    return f"DataLoader worker (pid {worker.pid}) exited unexpectedly with exit code {worker.exitcode}"


def _has_lost_a_child() -> bool:
    children = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
    return any(child.exitcode is not None for child in tuple(children))


def _came_out_of_a_loader(error: BaseException) -> bool:
    return any(frame.f_globals.get("__name__") == _LOADER for frame, _ in walk_tb(error.__traceback__))
