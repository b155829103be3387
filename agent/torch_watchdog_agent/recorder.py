"""Writes what a rank sees into its ring, where it outlives the rank.

Owns the ring's file and mapping; knows the layout only through `torch_watchdog_proto.record`. Called on the training thread: O(1), no lock, no IO.
The pages are reserved when the ring is made, so that a full /dev/shm fails here and not as a SIGBUS in the middle of a step.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch_watchdog_agent.identity import Identity
from torch_watchdog_proto.record import (
    DEVICE_WORDS_AT,
    DEVICE_WORDS_BYTES,
    KeyNamed,
    Note,
    Record,
    RingHeader,
    RingWriter,
    ring_bytes,
)

__all__ = ["UNKNOWN", "Recorder", "opened", "ring_capacity"]

RING_BYTES_PER_NODE = 16 << 20
UNKNOWN = (math.nan, math.nan)  # the range of a tensor of which none is known
_MAX_KEYS = 1 << 16  # a record has two bytes for a key's number
_NAME_AGAIN_EVERY = 512  # records of one key: a ring forgets, so a key's name is written again now and then


def ring_capacity(local_world_size: int) -> int:
    """Records per rank, so that all ranks of a node together stay within 16 MiB of shared memory."""
    share = min(2 << 20, RING_BYTES_PER_NODE // max(1, local_world_size))
    return max(64, (share - ring_bytes(0)) // (ring_bytes(1) - ring_bytes(0)))


@dataclass(slots=True)
class _Named:
    """A tensor's path. `left`: after how many records its name is written again; `legal`: with which range it was."""

    number: int
    left: int = 0
    legal: tuple[float, float] = UNKNOWN


class Recorder:
    """One rank's ring. Raises OSError where it cannot be made."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        attempt: int,
        world_size: int,
        local_world_size: int,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._say = say
        self.path = directory / f"{attempt}-{rank}-{os.getpid()}.ring"
        # A rank that executed itself anew has the pid of its former life; that ring is read through its open file.
        self.path.unlink(missing_ok=True)
        header = RingHeader(
            rank=rank, attempt=attempt, pid=os.getpid(), world_size=world_size, start_time_ns=time.time_ns(),
            capacity=ring_capacity(local_world_size),
        )  # fmt: skip
        memory = memoryview(_reserve(self.path, ring_bytes(header.capacity)))
        self._ring = RingWriter(memory, header)
        self.device_words = memory[DEVICE_WORDS_AT : DEVICE_WORDS_AT + DEVICE_WORDS_BYTES]
        self.write: Callable[[Record], None] = self._ring.write
        self._keys: dict[str, _Named] = {}

    def key_id(self, name: str, legal: tuple[float, float] = UNKNOWN) -> int | None:
        """The number of a tensor's path, written into the ring with its legal range when new, long not named, or when the range is another.

        None where there are too many for a number: batches whose keys are ids.
        """
        named = self._keys.get(name)
        if named is None:
            number = len(self._keys)
            if number == _MAX_KEYS:
                self._no_number(name)
                return None
            named = self._keys[name] = _Named(number)
        if not named.left or (named.legal is not legal and named.legal != legal):
            named.left, named.legal = _NAME_AGAIN_EVERY, legal
            self.write(KeyNamed(named.number, name, *legal))
        named.left -= 1
        return named.number

    def _no_number(self, name: str) -> None:
        """Said once."""
        say, self._say = self._say, lambda _: None
        say(f"the batches have had {_MAX_KEYS} tensors of different names: more are not recorded (the first of them: {name[:80]!r})")

    def note(self, text: str, *, level: int = 0) -> None:
        self.write(Note(level=level, time_ns=time.time_ns(), text=text))


def opened(directory: Path, who: Identity, *, say: Callable[[str], None]) -> Recorder | None:
    """The rank's ring, or None where there is no room for it."""
    try:
        return Recorder(
            directory, rank=who.rank, attempt=who.attempt, world_size=who.world_size, local_world_size=who.local_world_size, say=say
        )  # fmt: skip
    except OSError as error:
        say(f"no shared memory for the step records ({error}); training goes on, its timeline is lost")
        return None


def _reserve(path: Path, size: int) -> mmap.mmap:
    """A private file of `size` bytes, every page there, mapped."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
