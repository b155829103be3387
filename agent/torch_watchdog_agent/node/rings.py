"""The rings folder: finds the rings of this node's ranks and reads what is new in them.

Owns files, never processes. Reads with pread into a mirror of its own and never maps a ring: a file that is cut short must not end this process by
SIGBUS. Any file may be garbage, torn, or gone from one moment to the next.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch_watchdog_agent.node.blocks import BlockBuilder
from torch_watchdog_proto.messages import StepBlock
from torch_watchdog_proto.record import (
    COUNT,
    COUNT_AT,
    DEVICE_WORD,
    DEVICE_WORDS_AT,
    HEADER_BYTES,
    RECORD_BYTES,
    UPDATES_DONE,
    Note,
    RingFormatError,
    RingHeader,
    RingReader,
    RingVersionError,
    ring_bytes,
)

__all__ = ["RingFolder", "RingNews"]

_NAME = re.compile(r"(\d{1,9})-(\d{1,9})-(\d{1,9})\.ring")
_MAX_RINGS = 1024
_MAX_RING_BYTES = 64 << 20
_RECORDS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNews:
    """What one look at one ring gave. `more`: there is more to read now. `new`: the ring was not known before."""

    header: RingHeader
    blocks: tuple[StepBlock, ...] = ()
    notes: tuple[Note, ...] = ()
    more: bool = False
    new: bool = False


class RingFolder:
    """All rings of a folder. `is_alive` tells of a pid; the ring of a dead rank is read to its end, then removed. `say` is told once of rings that cannot
    be read because another torch-watchdog writes them.
    """

    def __init__(self, folder: Path, *, is_alive: Callable[[int], bool], say: Callable[[str], None]) -> None:
        self._folder, self._is_alive, self._say = folder, is_alive, say
        self._rings: dict[str, _Ring] = {}
        self._updates_on_device: dict[int, int] = {}  # of ranks that are gone, by pid
        self._has_told_version = False

    def poll(self) -> tuple[RingNews, ...]:
        """What is new in every ring; bounded, so that it may have to be called again at once (`more`)."""
        new = self._find_new()
        news = []
        for name, ring in tuple(self._rings.items()):
            replaced = ring.is_replaced(self._folder / name)
            alive = self._is_alive(ring.header.pid)  # asked before reading: what a rank wrote before its death is then all there
            found = ring.read(new=name in new, at_end=replaced or not alive)
            if found is not None:
                news.append(found)
            if (replaced or not alive) and (found is None or not found.more):
                self._drop(name, remove=not replaced)
        return tuple(news)

    def updates_on_device(self, pid: int) -> int | None:
        """How many updates the GPU of that rank, which has ended, had done; None where that is not known. Asked once of each."""
        gone = self._updates_on_device.pop(pid, 0)
        known = [ring.updates_on_device() for ring in self._rings.values() if ring.header.pid == pid]
        return (max(known) if known else gone) or None

    def close(self) -> None:
        for name in tuple(self._rings):
            self._rings.pop(name).close()

    def _find_new(self) -> set[str]:
        try:
            names = [name for name in os.listdir(self._folder) if _NAME.fullmatch(name) and name not in self._rings]  # noqa: PTH208
        except OSError:
            return set()
        room = _MAX_RINGS - len(self._rings)
        opened = ((name, _Ring.open(self._folder / name, self._of_another_version)) for name in sorted(names)[:room])
        found = {name: ring for name, ring in opened if ring is not None}
        self._rings |= found
        return set(found)

    def _of_another_version(self, name: str, found: RingVersionError) -> None:
        if not self._has_told_version:
            self._has_told_version = True
            self._say(
                f"a rank of this launch is not recorded: its torch-watchdog is not the one of this process ({name}: {found}). Its Python has another one "
                "installed than the `watchdog` that launched it: install the same version in both (`watchdog doctor` in each says which)"
            )

    def _drop(self, name: str, *, remove: bool) -> None:
        ring = self._rings.pop(name)
        self._updates_on_device[ring.header.pid] = ring.updates_on_device()
        ring.close()
        if remove:
            with suppress(OSError):
                (self._folder / name).unlink()


class _Ring:
    """One open ring and the mirror that its reader looks at."""

    def __init__(self, descriptor: int, mirror: bytearray) -> None:
        self._descriptor, self._mirror = descriptor, mirror
        self._reader = RingReader(memoryview(mirror))
        self.header = self._reader.header
        self._builder = BlockBuilder(self.header)

    @classmethod
    def open(cls, path: Path, of_another_version: Callable[[str, RingVersionError], None]) -> Self | None:
        """None where this is no ring, or none yet (its header comes last): it is looked at again next time."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return cls(descriptor, _mirror_of(descriptor, path.name))
        except RingVersionError as error:
            os.close(descriptor)
            of_another_version(path.name, error)
            return None
        except (OSError, RingFormatError):
            os.close(descriptor)
            return None

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)

    def is_replaced(self, path: Path) -> bool:
        """Whether another file has the name by now: a rank that executed itself anew, with the pid of its former life."""
        try:
            return path.stat().st_ino != os.fstat(self._descriptor).st_ino
        except OSError:
            return False  # the name is gone, the ring is still read

    def updates_on_device(self) -> int:
        """0 without a GPU, or where the file has been cut."""
        try:
            (done,) = DEVICE_WORD.unpack(_pread(self._descriptor, DEVICE_WORD.size, DEVICE_WORDS_AT + UPDATES_DONE * DEVICE_WORD.size))
        except OSError:
            return 0
        return int(done)

    def read(self, *, new: bool, at_end: bool) -> RingNews | None:
        """None where nothing is new."""
        try:
            written = self._refresh()
        except OSError:
            return None
        first_record = self._reader.position
        records, lost = self._reader.read(_RECORDS_AT_ONCE)
        block, notes = self._builder.build(records, first_record=first_record, lost=lost)
        more = self._reader.position <= written
        rest = self._builder.rest(first_record=self._reader.position) if at_end and not more else None
        blocks = tuple(one for one in (block, rest) if one is not None)
        return RingNews(header=self.header, blocks=blocks, notes=notes, more=more, new=new) if blocks or notes or more or new else None

    def _refresh(self) -> int:
        """Brings the mirror up to date: the slots that were written since, then the count as it was before them."""
        (written,) = COUNT.unpack(_pread(self._descriptor, COUNT.size, COUNT_AT))
        capacity = self.header.capacity
        first = max(self._reader.position, written - capacity + 1)
        last = min(written, first + _RECORDS_AT_ONCE - 1)
        for start, count in _slot_ranges(first, last, capacity):
            offset = HEADER_BYTES + start * RECORD_BYTES
            self._mirror[offset : offset + count * RECORD_BYTES] = _pread(self._descriptor, count * RECORD_BYTES, offset)
        COUNT.pack_into(self._mirror, COUNT_AT, written)
        return int(written)


def _slot_ranges(first: int, last: int, capacity: int) -> tuple[tuple[int, int], ...]:
    """Records `first`..`last` as (slot, count), in one piece or wrapped into two."""
    count = last - first + 1
    if count <= 0:
        return ()
    start = (first - 1) % capacity
    head = min(count, capacity - start)
    return ((start, head), (0, count - head)) if head < count else ((start, head),)


def _mirror_of(descriptor: int, name: str) -> bytearray:
    """An empty mirror with the ring's header. Raises OSError, RingFormatError."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or not HEADER_BYTES <= found.st_size <= _MAX_RING_BYTES:
        raise RingFormatError("not a regular file of this user, of a ring's size")
    mirror = bytearray(found.st_size)
    mirror[:HEADER_BYTES] = _pread(descriptor, HEADER_BYTES, 0)
    header = RingReader(memoryview(mirror)).header
    if f"{header.attempt}-{header.rank}-{header.pid}.ring" != name:
        raise RingFormatError("the header names another process than the file")
    del mirror[ring_bytes(header.capacity) :]
    return mirror


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        raise OSError(f"the ring ends at byte {offset + len(data)}")
    return data
