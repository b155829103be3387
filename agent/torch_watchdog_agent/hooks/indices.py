"""Which samples a batch was made of, as its loader's iterator knows: the sampler's indices in the order of the batches, and the worker.

Owns the bookkeeping on torch's iterators. Where the order is not certain nothing is said: no index is better than a wrong one.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

from torch_watchdog_agent.hooks.active import guarded, made_rank, rank
from torch_watchdog_agent.quarantine import dataset_name

__all__ = ["Indices", "Source", "hear_workers", "leave_out", "patch", "source_of"]

_ASKED = "_torch_watchdog_asked"  # indices that were handed to the data set, oldest first
_WORKER = "_torch_watchdog_worker"
_DATASET = "_torch_watchdog_dataset"

_is_left_out: Callable[[Any], bool] | None = None  # says of a batch's indices that nobody needs them


def leave_out(judge: Callable[[Any], bool]) -> None:
    """From now on no loader of this process makes the batches of which `judge` says so."""
    global _is_left_out
    _is_left_out = judge


class Source(NamedTuple):
    """Each None where unknown. `dataset`: its name in a quarantine file."""

    indices: Indices | None = None
    worker: int | None = None
    dataset: str | None = None


class Indices(Sequence[int | None]):
    """The sampler's own list of one batch, read only when it is asked for: most batches never are."""

    __slots__ = ("_listed",)

    def __init__(self, listed: Sequence[Any]) -> None:
        self._listed = listed

    @overload
    def __getitem__(self, place: int) -> int | None: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int | None]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int | None] | None:
        return [_whole(index) for index in self._listed[place]] if isinstance(place, slice) else _whole(self._listed[place])

    def __len__(self) -> int:
        return len(self._listed)


def _whole(index: Any) -> int | None:
    try:
        return operator.index(index)
    except TypeError:
        return None  # a data set of the user's own keys


def patch(iterator: Any) -> None:
    """Patches the base class of torch's iterators."""
    iterator._next_index = _noting(iterator._next_index)
    iterator._reset = _resetting(iterator._reset)


def hear_workers(iterator: Any) -> None:
    """Patches a class of iterators with workers. Before torch 2.6 the worker is not told."""
    iterator._process_data = _naming(iterator._process_data)


def source_of(iterator: Any) -> Source:
    """Of the batch that `iterator` has just made."""
    notes = iterator.__dict__
    asked = notes.get(_ASKED)
    index = asked.popleft() if asked else None
    worker, dataset = notes.get(_WORKER), notes.get(_DATASET) or _named(iterator)
    if index is None or not notes.get("_in_order", True):
        return Source(None, worker, dataset)
    if not isinstance(index, (list, tuple)):
        return Source(Indices((index,)), worker, dataset)
    return Source(None if index and index[0] is None else Indices(index), worker, dataset)


@guarded("quarantine")
def _named(iterator: Any) -> str:
    """Asked for once an iterator: the data set's length may be work."""
    name = iterator.__dict__[_DATASET] = dataset_name(iterator._dataset)
    return name


def _noting(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(theirs)
    def next_index(self: Any) -> Any:
        index = theirs(self)
        while _is_left_out is not None and _is_left_out(index):
            index = theirs(self)
        if isinstance(index, list):
            index = _left_out(self, index) or index
        notes = self.__dict__
        if _ASKED not in notes:
            notes[_ASKED] = deque()
        notes[_ASKED].append(index)
        return index

    return next_index


@guarded("quarantine")
def _left_out(iterator: Any, index: list[Any]) -> Any:
    """The batch without its quarantined samples; None where nothing is to be left out."""
    here = made_rank() or rank()
    if here is None or not here.quarantine.holds_any:
        return None
    return here.quarantine.replaced(iterator.__dict__.get(_DATASET) or dataset_name(iterator._dataset), index)


def _resetting(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.pop(_ASKED, None)
        return theirs(self, *args, **kwargs)

    return reset


def _naming(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def process_data(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__[_WORKER] = args[0] if args and isinstance(args[0], int) else None
        return theirs(self, data, *args, **kwargs)

    return process_data
