"""What torch's own flight recorder knows of this rank's collectives: also of those that C++ calls (the gradients' of a backward), and how far each came.

Owns reading its dump, as JSON and never as a pickle, and the file of it. gloo's recorder and NCCL's are asked where this torch has them and they record
(TORCH_FR_BUFFER_SIZE, before torch 2.8 TORCH_NCCL_TRACE_BUFFER_SIZE). NCCL's asks the device while it holds the interpreter's lock: only where that answers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["NOTHING", "Flight", "Recorded", "keep", "read"]

NUM_KEPT = 100  # collectives in the file, the newest
_NCCL, _ANY = "_dump_nccl_trace_json", "_dump_fr_trace_json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The newest collective of one process group. `tensors`: shape and dtype of each, the dtype as C++ calls it (`Float`)."""

    name: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    state: str
    enqueued: str
    completed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """`newest` by the group's name; `dumps` as torch gave them."""

    newest: Mapping[str, Recorded]
    dumps: tuple[Mapping[str, Any], ...] = ()

    @property
    def lines(self) -> str:
        """For a person, behind a stack."""
        return "".join(
            f"  flight recorder, process group {group}: {one.name} ({one.state}); {one.enqueued} enqueued, {one.completed} completed\n"
            for group, one in self.newest.items()
        )


NOTHING = Flight(newest={})


def read(*, device_answers: Callable[[], bool]) -> Flight:
    """Empty where torch records nothing. Raises what a dump that is not as expected makes of itself."""
    module = sys.modules.get("torch._C._distributed_c10d")
    asked = [getattr(module, _ANY, None), *([getattr(module, _NCCL, None)] if hasattr(module, _NCCL) and device_answers() else [])]
    dumps = tuple(json.loads(dump(True, False)) for dump in asked if dump is not None)
    return Flight(newest={group: one for dump in dumps for group, one in _newest(dump)}, dumps=dumps)


def keep(flight: Flight, path: Path) -> None:
    """The dumps as a file, of the newest collectives. Raises OSError."""
    if not flight.newest:
        return
    kept = [{**dump, "entries": dump.get("entries", [])[-NUM_KEPT:]} for dump in flight.dumps]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(kept, file)


def _newest(dump: Mapping[str, Any]) -> Iterator[tuple[str, Recorded]]:
    last: dict[str, Mapping[str, Any]] = {}
    for entry in dump.get("entries", ()):
        if not entry.get("is_p2p"):
            last[str(entry["process_group"][0])] = entry
    for group, entry in last.items():
        status = dump.get("pg_status", {}).get(str(entry.get("pg_id")), {})
        shapes, dtypes = entry.get("input_sizes", ()), entry.get("input_dtypes", ())
        yield (
            group,
            Recorded(
                name=str(entry["profiling_name"]).partition(":")[2],
                tensors=tuple((tuple(shape), str(dtype)) for shape, dtype in zip(shapes, dtypes, strict=False)),
                state=str(entry.get("state", "?")),
                enqueued=str(status.get("last_enqueued_collective", "?")),
                completed=str(status.get("last_completed_collective", "?")),
            ),
        )
