"""The collectives that Python calls on a process group: each is compared with the neighbours' before it is made.

Owns what of a collective must be equal on all ranks, and how many of each group this rank has called. The methods of ProcessGroup are hooked, not
the functions of torch.distributed, which dynamo knows by identity. The group's own number tells which belong together: it counts what C++ calls,
too (DDP, compiled regions).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from torch_watchdog_agent.hooks import groups
from torch_watchdog_agent.hooks.active import collective_failed, guarded, made_rank
from torch_watchdog_agent.lockstep import Collective
from torch_watchdog_agent.rescue.flight import NOTHING, Flight, Recorded
from torch_watchdog_proto.rescue_words import GroupCalls

__all__ = ["calls_made", "described", "patch"]

_NAMES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "broadcast": "broadcast", "reduce": "reduce", "allgather": "all_gather",
    "allgather_coalesced": "all_gather", "_allgather_base": "all_gather_into_tensor", "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter_tensor", "reduce_scatter_single": "reduce_scatter_tensor",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all_single", "all_to_all_single": "all_to_all_single", "gather": "gather",
    "scatter": "scatter", "barrier": "barrier",
}  # fmt: skip
_MONITORED = "monitored_barrier"  # gloo counts each of its messages: more of them on the first rank than on the others
_OF_ANY_SIZE = frozenset(
    {"all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "monitored_barrier"}
)  # each rank may bring its own
_FIRST_HOLDS_IT = frozenset({"all_reduce", "broadcast", "reduce", "all_gather"})  # the others have it in their second argument
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})
_BETWEEN_TWO = ("send", "recv", "recv_anysource")  # gloo numbers these, too, and only on the ranks that take part
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}
_RECORDED_AS = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}
_CALLED_BY_CPP = frozenset({"all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"})
_BY_CPP = " (called by C++, as a backward's are)"
_MAX_SHAPES = 4
_MAX_DESCRIBED = 4096
_described: dict[Any, Collective] = {}
_newest: dict[str, tuple[int, Collective | None, int]] = {}  # of each group: its number, what Python called, and how often it had before
_inside: dict[str, int] = {}  # of each group that waits in a monitored_barrier: the number behind it, were it one collective
_times: Counter[tuple[str, int]] = Counter()  # of each group and each kind of call
_by_python: Counter[str] = Counter()  # of each group
_not_collective: dict[str, int] = {}  # of each group: numbers that went to calls between two ranks


def patch(module: ModuleType) -> None:
    groups.patch(module)
    for method, name in _NAMES.items():
        theirs = getattr(module.ProcessGroup, method, None)
        if theirs is not None:
            setattr(module.ProcessGroup, method, _compared(theirs, name))
    for method in _BETWEEN_TWO:
        setattr(module.ProcessGroup, method, _set_apart(getattr(module.ProcessGroup, method)))
    if hasattr(module.ProcessGroup, _MONITORED):
        setattr(module.ProcessGroup, _MONITORED, _counted_once(module.ProcessGroup.monitored_barrier))
    if hasattr(module, "Work"):
        module.Work.wait = _heard(module.Work.wait)


def _heard(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What a collective meets on its way is raised where it is waited for."""

    @functools.wraps(theirs)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return theirs(self, *args, **kwargs)
        except RuntimeError as error:
            collective_failed(error)
            raise

    return wait


def calls_made(flight: Flight = NOTHING) -> tuple[GroupCalls, ...]:
    """What this rank has called so far, one entry a group. On any thread; nothing of it waits. `flight`: knows what C++ has called, too."""
    made = (_made_on(group, flight) for group in groups.living())
    return tuple(one for one in made if one is not None)


def _made_on(group: Any, flight: Flight) -> GroupCalls | None:
    key, number = group.group_name, _number_of(group)
    if number is None:
        return None
    made = max(0, number - _not_collective.get(key, 0))
    at, newest, times = _newest.get(key, (-1, None, 0))
    if newest is None or at + 1 != number:  # C++ has called since
        words, alike = _recorded(flight.newest.get(key))
        return GroupCalls(group=key, made=made, newest=words, alike=alike, times=max(0, made - _by_python[key] - 1))
    return GroupCalls(group=key, made=made, newest=newest.words, alike=newest.alike, times=times)


def _recorded(newest: Recorded | None) -> tuple[str, int]:
    """A call of C++'s in words, and what must be equal of it where that is known."""
    if newest is None:
        return "", 0
    import torch

    name = _RECORDED_AS.get(newest.name, newest.name)
    tensors = [(shape, getattr(torch, _DTYPES.get(dtype, dtype.lower()), None)) for shape, dtype in newest.tensors]
    if any(dtype is None for _, dtype in tensors):
        return f"{name}{_BY_CPP}", 0
    found = described(name, tensors)
    return f"{found.words}{_BY_CPP}", found.alike if name in _CALLED_BY_CPP else 0


def _number_of(group: Any) -> int | None:
    """Of its next call; None where the backend does not count."""
    if group.group_name in _inside:
        return _inside[group.group_name]
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return None


def _set_apart(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _number_before(self)
        try:
            return theirs(self, *args, **kwargs)
        finally:
            _count_apart(self, before)

    return call


@guarded("collectives")
def _number_before(group: Any) -> int | None:
    return _number_of(group)


@guarded("collectives")
def _count_apart(group: Any, before: int | None) -> None:
    after = _number_of(group)
    if before is not None and after is not None:
        _not_collective[group.group_name] = _not_collective.get(group.group_name, 0) + after - before


def _counted_once(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _number_before(self)
        _about_to(self, _MONITORED, ())
        _enter(self, before)
        try:
            return theirs(self, *args, **kwargs)
        except RuntimeError as error:
            collective_failed(error)
            raise
        finally:
            _leave(self, before)

    return call


@guarded("collectives")
def _enter(group: Any, before: int | None) -> None:
    if before is not None:
        _inside[group.group_name] = before + 1


@guarded("collectives")
def _leave(group: Any, before: int | None) -> None:
    key = group.group_name
    _inside.pop(key, None)
    after = _number_of(group)
    if before is None or after is None:
        return
    _not_collective[key] = _not_collective.get(key, 0) + after - before - 1
    number, called, times = _newest.get(key, (-1, None, 0))
    if number == before:
        _newest[key] = after - 1, called, times


def _compared(theirs: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _about_to(self, name, args)
        try:
            return theirs(self, *args, **kwargs)
        except RuntimeError as error:
            collective_failed(error)
            raise

    return call


@guarded("collectives")
def _about_to(group: Any, name: str, args: Sequence[Any]) -> None:
    here = made_rank()
    if here is None:
        return
    key, called, number = group.group_name, _known(name, args), _number_of(group)
    if number is None:
        here.lockstep = None
        return
    times = _times[key, called.alike]
    _times[key, called.alike] += 1
    _by_python[key] += 1
    _newest[key] = number, called, times
    if here.lockstep is None:
        return
    if not here.lockstep.knows(key):
        here.lockstep.join(key, _peers_of(group, here.identity))
    mismatch = here.lockstep.about_to(called, key, number - _not_collective.get(key, 0), times)
    if mismatch is not None:
        here.out_of_step(mismatch)


def _peers_of(group: Any, who: Any) -> tuple[int, ...]:
    """The group's ranks of this node by local rank: a launcher numbers the ranks of a node one after the other."""
    from torch.distributed import get_process_group_ranks

    first = who.rank - who.local_rank
    return tuple(rank - first for rank in get_process_group_ranks(group) if 0 <= rank - first < who.local_world_size)


def _known(name: str, args: Sequence[Any]) -> Collective:
    """A training calls the same few again and again: each is put into words once."""
    tensors = list(_tensors(args[: 1 if name in _FIRST_HOLDS_IT else 2][-1:])) if name != "barrier" else []
    key = (name, *[(tensor.shape, tensor.dtype) for tensor in tensors])
    known = _described.get(key)
    if known is None:
        if len(_described) >= _MAX_DESCRIBED:
            _described.clear()
        known = _described[key] = described(name, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    return known


def _tensors(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "element_size"):
        yield value


def described(name: str, tensors: Sequence[tuple[tuple[int, ...], Any]]) -> Collective:
    """By shapes and dtypes. Bytes must be equal where they are only moved, numbers where they are added up."""
    words = f"{name} of {_shapes(tensors)}" if tensors else name
    if name in _OF_ANY_SIZE:
        return Collective(name, words)
    if name in _REDUCING:
        return Collective(f"{name} {[(math.prod(shape), dtype) for shape, dtype in tensors]}", words)
    return Collective(f"{name} {[math.prod(shape) * dtype.itemsize for shape, dtype in tensors]}", words)


def _shapes(tensors: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    shapes = list(dict.fromkeys(shape for shape, _ in tensors))
    told = ", ".join(map(str, shapes[:_MAX_SHAPES])) + (", ..." if len(shapes) > _MAX_SHAPES else "")
    return f"{told} {str(tensors[0][1]).removeprefix('torch.')}"
