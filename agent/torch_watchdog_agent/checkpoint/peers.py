"""The ranks that write or read one checkpoint together, on a gloo group of our own.

Owns making that group, and the rule that a stage that failed on one rank fails on all: nobody is left waiting in a collective
for a rank that has given up. A group of our own, because the user's may be in use by a checkpoint of theirs, and gloo, because a
checkpoint must not depend on the fabric that may have just failed.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torch_watchdog_agent.checkpoint.errors import CheckpointError, in_words

T = TypeVar("T")
_LOOK_S = 0.5  # how often a rank that waits for the others looks whether it need not any more


class Peers:
    """`rank` is global, `index` this rank's place among them; `group` is None where there is no process group at all."""

    def __init__(self, group: Any | None, *, rank: int, index: int, count: int) -> None:
        self.group = group
        self.rank = rank
        self.index = index
        self.count = count

    @property
    def first(self) -> bool:
        return self.index == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree_own(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; its result here, or the same CheckpointError everywhere where it failed on any."""
        result: Any = None
        cause: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  torch's CheckpointException is no Exception; raised again below, on all ranks alike
            cause = error
        told = self.gather(None if cause is None else in_words(cause))
        failures = [f"rank {index}: {failure}" for index, failure in enumerate(told) if failure]
        if isinstance(cause, (CheckpointError, KeyboardInterrupt, SystemExit)):
            raise cause
        if failures:
            raise CheckpointError("; ".join(failures)) from cause
        own: T = result
        return own


@dataclass(frozen=True, slots=True, kw_only=True)
class RollCall:
    """`name`: of what the ranks come together for, each time another; `why_not`: why no rank need be waited for any more, or nothing."""

    name: str
    why_not: Callable[[], str]


def all_come(call: RollCall, world_size: int, *, timeout_s: float) -> None:
    """Returns once every rank has called this. A group that is being made waits for a rank that will never come, and nothing can end that."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    if (members := dist.get_world_size()) != world_size:
        raise CheckpointError(f"{world_size} ranks, but {members} in the process group: a common checkpoint needs one group of all")
    store, place = dist.distributed_c10d._get_default_store(), f"torch_watchdog/{call.name}"
    if store.add(f"{place}/here", 1) >= world_size:
        store.set(f"{place}/all", "here")
    deadline = time.monotonic() + timeout_s
    while not _has_come(store, f"{place}/all"):
        why = call.why_not() or ("" if time.monotonic() < deadline else f"not every rank came within {timeout_s:g} s")
        if why:
            raise CheckpointError(why)


def _has_come(store: Any, key: str) -> bool:
    look_ends = time.monotonic() + _LOOK_S
    try:
        store.wait([key], timedelta(seconds=_LOOK_S))
    except dist.DistNetworkError as error:
        raise CheckpointError(f"the process group's store is lost ({in_words(error)})") from error
    except RuntimeError:  # not yet
        time.sleep(max(0.0, look_ends - time.monotonic()))
        return False
    return True


@contextmanager
def peers_of(rank: int, world_size: int, *, timeout_s: float) -> Iterator[Peers]:
    """All ranks of the job. Collective, where there is a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        if world_size > 1:
            raise CheckpointError(
                f"{world_size} ranks, but no process group: a common checkpoint needs torch.distributed to be initialised"
            )
        yield Peers(None, rank=rank, index=0, count=1)
        return
    group = _group_of(world_size, timeout_s)
    try:
        yield Peers(group, rank=rank, index=rank, count=world_size)
    except BaseException:
        _groups.clear()  # it may be out of step with the other ranks: the next checkpoint makes a new one
        raise


# The groups made so far, by (world group, timeout). Never destroyed: gloo's destructor joins its thread while it holds the GIL, and that thread
# may need the GIL to let go of its last work. So one group serves all checkpoints, and a reference that nobody returns outlives the interpreter.
_groups: dict[tuple[int, float], tuple[weakref.ref[Any], Any]] = {}


def _group_of(world_size: int, timeout_s: float) -> Any:
    world = dist.group.WORLD
    known = _groups.get((id(world), timeout_s))
    if known is not None and known[0]() is world:
        return known[1]
    group = dist.new_group(ranks=list(range(world_size)), backend="gloo", timeout=timedelta(seconds=timeout_s))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _groups[id(world), timeout_s] = (weakref.ref(world), group)
    return group
