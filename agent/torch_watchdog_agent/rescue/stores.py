"""Whose store it was that has raised: one of the script's own (a cache, a server of data, a lock), or the one by which the job's ranks find each other.

Owns that judgement over one exception object; asks torch, where it is there, for the job's stores.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any

__all__ = ["is_of_own_store"]

_ERRORS = ("DistNetworkError", "DistStoreError")
# Python of torch's that makes a store, or calls one that it was given, for whoever asks.
_FOR_ANYBODY = ("torch.distributed.rendezvous", "torch.distributed.elastic.utils.store")
_OF_TORCH = ("torch", __name__.partition(".")[0])
_OF_DATA = "torch.utils.data."
_ASKS_FOR_THE_JOBS = frozenset({"_get_default_store", "_get_process_group_store"})
_PORT = re.compile(r"[,:] ?(\d+)\)")
_MAX_WRAPPED = 8


def is_of_own_store(error: BaseException) -> bool:
    """Whether a store raised it that was called from outside of torch, as collectives call none, and that is none of the job's as far as can be seen."""
    if type(error).__module__ != "torch.distributed" or type(error).__name__ not in _ERRORS:
        return False
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(at.tb_frame)
        at = at.tb_next
    while frames and _module(frames[-1]) in _FOR_ANYBODY:
        frames.pop()
    if not frames or (_module(frames[-1]).partition(".")[0] in _OF_TORCH and not _module(frames[-1]).startswith(_OF_DATA)):
        return False
    return not _reaches_the_jobs(frames[-1], str(error))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _reaches_the_jobs(frame: FrameType, text: str) -> bool:
    """Whether that frame may have called the job's store: by the port in the error's words, or by what the frame holds."""
    if not _ASKS_FOR_THE_JOBS.isdisjoint(frame.f_code.co_names):
        return True
    jobs = list(map(_innermost, _stores_of_the_job()))
    ports = {port for store in jobs if (port := getattr(store, "port", None)) is not None} | {os.environ.get("MASTER_PORT")}
    if any(int(found) in ports or found in ports for found in _PORT.findall(text)):
        return True
    return any(store in jobs or getattr(store, "port", None) in ports for store in map(_innermost, _held(frame)))


def _stores_of_the_job() -> Iterable[Any]:
    """Of every process group, as torch keeps them."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return [store for _, store in getattr(world, "pg_map", {}).values() if store is not None]


def _held(frame: FrameType) -> Iterator[Any]:
    """The stores that the code of the frame can name, or has in an object that it can name."""
    kind = getattr(sys.modules.get("torch.distributed"), "Store", None)
    if kind is None:
        return
    values = [*frame.f_locals.values(), *(frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals)]
    for value in values:
        yield from (one for one in (value, *_attributes(value)) if issubclass(type(one), kind))


def _attributes(value: Any) -> list[Any]:
    """As they are: no code of the object's runs."""
    if isinstance(value, ModuleType | type):
        return []
    try:
        return list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        return []


def _innermost(store: Any) -> Any:
    """Without the prefixes that torch puts in front of a store's keys."""
    for _ in range(_MAX_WRAPPED):
        with suppress(AttributeError, RuntimeError):
            store = store.underlying_store
            continue
        break
    return store
