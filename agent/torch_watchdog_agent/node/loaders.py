"""What a rank and the worker processes of its data loaders are doing, seen from beside them: the kernel's word for each, and its Python stack by py-spy.

Owns the search for the workers and the words. Nothing is stopped for it, and the rank hears nothing of it. Where py-spy is missing or may not read, the
kernel's word is all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch_watchdog_agent.node.outside import stack_of
from torch_watchdog_agent.node.processes import parent_of, state_of

__all__ = ["look_at_loader"]

MAX_WORKERS = 32
MAX_STACKS = 4  # of workers; each may take as long as py-spy may
_NAME = "pt_data_worker"  # torch's, from 2.6 on
_STATES = {
    "R": "runs",
    "S": "waits",
    "D": "waits for a disk or a network",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}
_ORDER = "DTtRSZ"  # who may be the one that is waited for comes first
_LOOP, _GET = "_worker_loop (", "Queue.get (multiprocessing/queues.py"


def look_at_loader(pid: int) -> str:
    """A line for the rank and for each worker, each with its stack indented below it. Takes seconds at most: not for a loop's thread. Never raises."""
    workers = sorted(_workers(pid)[:MAX_WORKERS], key=lambda worker: _ORDER.find(state_of(worker) or "Z"))
    parts = [_looked_at(pid, f"rank, pid {pid}", stack=True)]
    parts += [_looked_at(worker, f"worker, pid {worker}", stack=number < MAX_STACKS) for number, worker in enumerate(workers)]
    return "".join(parts)


def _looked_at(pid: int, name: str, *, stack: bool) -> str:
    state = state_of(pid)
    if state is None:
        return f"{name}: has ended\n"
    frames = [line.strip() for line in stack_of(pid).splitlines()] if stack else []
    place = _read(f"/proc/{pid}/wchan")
    kernel = "" if place in ("", "0") else f" ({place})"
    doing = _STATES.get(state, f"is in state {state}")
    at = "" if not frames else ", for the loop to ask for a batch" if _is_idle(frames) else f", in {frames[0]}"
    return "\n".join((f"{name}: {doing}{kernel}{at}", *(f"    {frame}" for frame in frames), ""))


def _is_idle(frames: list[str]) -> bool:
    """A worker that has nothing to do: what its loop has called is the queue of what is asked for."""
    called = next((number - 1 for number, frame in enumerate(frames) if frame.startswith(_LOOP)), -1)
    return called >= 0 and frames[called].startswith(_GET)


def _workers(pid: int) -> list[int]:
    """By torch's name for them; those of an older torch by their command: a fork's is the rank's own, a spawned one's is multiprocessing's."""
    below = list(_descendants(pid))
    named = [one for one in below if _read(f"/proc/{one}/comm").startswith(_NAME)]
    own = _read(f"/proc/{pid}/cmdline")
    return named or [one for one in below if (command := _read(f"/proc/{one}/cmdline")) == own or "--multiprocessing-fork" in command]


def _descendants(pid: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        parent = parent_of(int(path.name))
        if parent is not None:
            children.setdefault(parent, []).append(int(path.name))
    todo = [pid]
    while todo:
        found = sorted(children.pop(todo.pop(), ()))
        yield from found
        todo += found


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""
