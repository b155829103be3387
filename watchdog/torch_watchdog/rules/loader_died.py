"""loader.worker_died: a worker process of the data loader has died, and the rank's loop ended of it.

By torch's own text, for which the worker's exit is the cause. An exception raised inside a worker is none of these: that worker lives, and the user's
dataset is at fault. Knows nothing of ranks or incidents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

__all__ = ["LoaderDeath", "loader_death"]

_KILLED = re.compile(r"DataLoader worker \(pid (?P<pids>\d+)\) is killed by signal: (?P<signal>[^.\n]+)")
_EXITED = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) exited unexpectedly(?: with exit code (?P<code>\d+))?")
_FIRST = re.compile(r"(?P<error>.+); DataLoader worker ")  # what the rank itself met, before our words for the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderDeath:
    """Who died, why as far as it is known, and what to change. `then`: what the rank met of it."""

    said: str
    cause: str
    fix: str
    then: str = ""


def loader_death(text: str) -> LoaderDeath | None:
    """The death of a worker that this error tells of."""
    first = _FIRST.match(text)
    then = "" if first is None else f"; the rank then met {first['error']}"
    killed = _KILLED.search(text)
    if killed is not None:
        return replace(_killed(killed["pids"], killed["signal"].strip()), then=then)
    exited = _EXITED.search(text)
    return None if exited is None else replace(_exited(exited["pids"].strip(), exited["code"]), then=then)


def _exited(pid: str, code: str | None) -> LoaderDeath:
    return LoaderDeath(
        said=f"data loader worker (pid {pid}) exited unexpectedly" + (f" with exit code {code}" if code else ""),
        cause="a worker process of the data loader ended without an exception: the dataset (or what it calls) called exit, or something outside ended it",
        fix="run once with num_workers=0: what ended the worker then ends the rank, with its own message; what it printed last is in the rank's log",
    )


def _killed(pid: str, signal: str) -> LoaderDeath:
    cause, fix = next(
        (known for word, known in _BY_SIGNAL.items() if word in signal),
        ("the signal came from outside, or from native code in the dataset", "look at who sent it: the kernel's log, the scheduler"),
    )
    return LoaderDeath(said=f"data loader worker (pid {pid}) killed by signal: {signal}", cause=f"the worker was killed: {cause}", fix=fix)


_BY_SIGNAL = {  # the words of strsignal(), as torch prints them
    "Killed": (
        "often the kernel or the container for want of memory, to which each worker's copy of the dataset and its prefetched batches add",
        "take fewer workers or a smaller prefetch_factor, keep the dataset in arrays instead of Python objects, or raise the memory limit",
    ),
    "Bus error": (
        "shared memory (/dev/shm) is full: batches travel through it",
        "raise the container's shared memory (--shm-size, or a memory-backed emptyDir at /dev/shm), or take fewer workers",
    ),
    "Segmentation fault": (
        "a fault in native code of the dataset (decoders, and libraries that do not survive a fork)",
        "try multiprocessing_context='spawn', and open files and databases inside the worker, not before the fork",
    ),
    "Aborted": (
        "native code of the dataset gave up",
        "read what the worker wrote last in the rank's log, and run once with num_workers=0",
    ),
}
