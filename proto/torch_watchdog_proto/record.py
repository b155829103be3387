"""The ring: a rank's memory that outlives it. One file per rank process, written by the rank, read by its node process.

Owns the byte layout, for writer and reader alike; knows nothing of files, mmap or torch: both sides hand in a writable or readable buffer.

Layout, little-endian, version 4:

    0     header, 128 bytes: magic, version, record size, capacity, rank, attempt, pid, world size, start time; at 64 the count of records written, as
          the machine writes a whole number: one store, so that a reader sees the old count or the new one; at 80 the rank's words with its GPU, 32 bits
          each, 0 without one: of a rank that was killed they tell how far its device was, while Python was steps ahead
    128   `capacity` slots of RECORD_BYTES: sequence number (from 1), crc32 of the rest, kind, payload length, payload

Record n lives in slot (n - 1) % capacity. The writer fills the slot, then raises the count; the reader takes a slot only where number and checksum agree, so
that a torn write (a rank killed in the middle) is seen and counted, never believed. Writing is on the training thread, where every call of Python counts: a
record's fields are in the order of its bytes, and most are packed as they are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from zlib import crc32 as _crc32

__all__ = [
    "COUNT",
    "COUNT_AT",
    "DEVICE_WORD",
    "DEVICE_WORDS_AT",
    "DEVICE_WORDS_BYTES",
    "HEADER_BYTES",
    "RECORD_BYTES",
    "VERSION",
    "DeviceNamed",
    "GradientsSharded",
    "KeyNamed",
    "MicroStep",
    "Note",
    "Record",
    "RingFormatError",
    "RingHeader",
    "RingReader",
    "RingVersionError",
    "RingWriter",
    "StepDone",
    "TensorSeen",
    "TokenizerSeen",
    "UPDATES_DONE",
    "ring_bytes",
]

MAGIC = b"TWRING\r\n"
VERSION = 4
HEADER_BYTES = 128
RECORD_BYTES = 256
MAX_DIMENSIONS = 8

_HEADER = struct.Struct("<8sHHIiIIIQ")
COUNT = struct.Struct("=Q")
COUNT_AT = 64
DEVICE_WORD = struct.Struct("=I")
DEVICE_WORDS_AT, DEVICE_WORDS_BYTES = 80, 4 * DEVICE_WORD.size
UPDATES_DONE = 2  # which of them the device counts its updates in; the others are its gate's
_SLOT = struct.Struct("<QIHH")  # sequence number, crc32, kind, payload length
_NUMBER, _KIND = struct.Struct("<QI"), struct.Struct("<HH")  # the two halves of a slot's head
_PAYLOAD_BYTES = RECORD_BYTES - _SLOT.size
_CRC_FROM = 12  # the checksum covers kind, length and payload, and starts from the sequence number

_KEY = struct.Struct("<HHdd")
_TENSOR = tuple(struct.Struct(f"<HBBQIddQQ?{dimensions}q") for dimensions in range(MAX_DIMENSIONS + 1))
_NUM_DIMENSIONS_AT = 3
_MICRO = struct.Struct("<QIQQd??Qdd")
_STEP = struct.Struct("<QQQIQQQ?qQdIQ")
_NOTE = struct.Struct("<BQ")
_TOKENIZER = struct.Struct("<Q")

_DTYPES = (
    "int64", "int32", "int16", "int8", "uint8", "bool", "float32", "float64", "float16", "bfloat16", "complex64", "complex128",
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "other",
)  # fmt: skip
_DTYPE_CODE = {name: code for code, name in enumerate(_DTYPES)}


class RingFormatError(ValueError):
    """A buffer that is no ring of a version that is known here."""


class RingVersionError(RingFormatError):
    """It is one of another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingHeader:
    """Who writes this ring. `attempt` is the launcher's restart count; `start_time_ns` is wall time."""

    rank: int
    attempt: int
    pid: int
    world_size: int
    start_time_ns: int
    capacity: int


class KeyNamed(NamedTuple):
    """Gives the path of a tensor in the batch a number, and the range that the run is known to take (NaN: not known).

    Repeated now and then, because rings forget, and when the range becomes known.
    """

    key_id: int
    name: str
    low: float = math.nan
    high: float = math.nan


class DeviceNamed(NamedTuple):
    """The GPU that this rank computes on, as the driver names it; repeated now and then."""

    uuid: str


class TensorSeen(NamedTuple):
    """One tensor of the batch of one micro-step. `low` and `high` are exact up to 2**53; NaN where there was no element to look at."""

    key_id: int
    dtype: str
    step: int
    micro_step: int
    low: float
    high: float
    negatives: int
    ignored: int
    finite: bool
    shape: tuple[int, ...]


class MicroStep(NamedTuple):
    """One batch: when it was handed over (wall time), how long the loop waited for it, and its loss once that is known.

    `forward_ns`: from the hand-over to backward, on the device where it runs there; 0 where not known. `scale`: the GradScaler's newest known, 0: none.
    `reach`: the largest |2p - 1| of the probabilities p that binary_cross_entropy was given, so that 1 is the edge of its domain; 0: none.
    """

    step: int
    micro_step: int
    time_ns: int
    loader_ns: int
    loss: float
    loss_known: bool
    evaluation: bool = False
    forward_ns: int = 0
    scale: float = 0.0
    reach: float = 0.0


class StepDone(NamedTuple):
    """One update window has passed its gate (`vetoed`: without an update). Bytes and retries are the allocator's figures, 0 on a CPU.

    `backward_ns`: the loop's time from each loss to the next fetch or the gate, and where its forward waits for other ranks. `grad_norm`: what the
    loop's own clipping computed, or on request we, -1: nothing. `update_ns`: the part of `backward_ns` from the gate to the end of the update; 0 where not
    known, or no update was.
    """

    step: int
    time_ns: int
    step_ns: int
    micro_steps: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    vetoed: bool
    updates_applied: int
    backward_ns: int = 0
    grad_norm: float = -1.0
    alloc_retries: int = 0
    update_ns: int = 0


class Note(NamedTuple):
    """A line of text: what the agent had to say, or the first line of an exception. Level 0 info, 1 warning, 2 error."""

    level: int
    time_ns: int
    text: str


class TokenizerSeen(NamedTuple):
    """How many ids the tokenizer of this rank's data has; repeated now and then."""

    tokens: int


class GradientsSharded(NamedTuple):
    """The norms of gradients that this rank records are those of its own shard; repeated now and then."""


Record: TypeAlias = KeyNamed | TensorSeen | MicroStep | StepDone | Note | DeviceNamed | TokenizerSeen | GradientsSharded


def ring_bytes(capacity: int) -> int:
    """Size of a ring of so many records."""
    return HEADER_BYTES + capacity * RECORD_BYTES


class RingWriter:
    """Writes records into a buffer of `ring_bytes(capacity)`. O(1), no system call. Not for two threads at once."""

    def __init__(self, buffer: memoryview, header: RingHeader) -> None:
        if len(buffer) < ring_bytes(header.capacity):
            raise RingFormatError(
                f"a ring of {header.capacity} records needs {ring_bytes(header.capacity)} bytes, the buffer has {len(buffer)}"
            )
        self._buffer, self._capacity, self._written = buffer, header.capacity, 0
        self._count = buffer[COUNT_AT : COUNT_AT + COUNT.size].cast("Q")
        self._count[0] = 0
        _HEADER.pack_into(
            buffer,
            0,
            MAGIC,
            VERSION,
            RECORD_BYTES,
            header.capacity,
            header.rank,
            header.attempt,
            header.pid,
            header.world_size,
            header.start_time_ns,
        )

    def write(self, record: Record) -> None:
        """Appends one record; the oldest gives way."""
        kind, pack = _PACK[type(record)]
        payload = pack(*record)
        checked = _KIND.pack(kind, len(payload)) + payload
        self._written = number = self._written + 1
        offset = HEADER_BYTES + (number - 1) % self._capacity * RECORD_BYTES
        self._buffer[offset : offset + _CRC_FROM + len(checked)] = _NUMBER.pack(number, _crc32(checked, number & 0xFFFFFFFF)) + checked
        self._count[0] = number


class RingReader:
    """Reads what is new in a ring that its writer may be filling, or died filling."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.header = _read_header(buffer)
        self._next = 1

    @property
    def position(self) -> int:
        """Sequence number of the record that `read` looks at next."""
        return self._next

    def read(self, limit: int = 4096) -> tuple[tuple[Record, ...], int]:
        """Up to `limit` new records in order, and how many were lost (overwritten before they were read, or torn)."""
        (written,) = COUNT.unpack_from(self._buffer, COUNT_AT)
        oldest = max(1, written - self.header.capacity + 1)
        lost = max(0, oldest - self._next)
        self._next = max(self._next, oldest)
        last = min(written, self._next + limit - 1)
        records = []
        for number in range(self._next, last + 1):
            record = self._slot(number)
            if record is None:
                lost += 1
            else:
                records.append(record)
        self._next = max(self._next, last + 1)
        return tuple(records), lost

    def _slot(self, number: int) -> Record | None:
        offset = HEADER_BYTES + (number - 1) % self.header.capacity * RECORD_BYTES
        slot = bytes(self._buffer[offset : offset + RECORD_BYTES])
        found, checksum, kind, length = _SLOT.unpack_from(slot)
        if found != number or length > _PAYLOAD_BYTES or checksum != _crc32(slot[_CRC_FROM : _SLOT.size + length], number & 0xFFFFFFFF):
            return None
        return _unpack(kind, slot[_SLOT.size : _SLOT.size + length])


def _read_header(buffer: memoryview) -> RingHeader:
    if len(buffer) < HEADER_BYTES:
        raise RingFormatError(f"a ring has at least {HEADER_BYTES} bytes, this has {len(buffer)}")
    magic, version, record_bytes, capacity, rank, attempt, pid, world_size, start_time_ns = _HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise RingFormatError("this is no ring: its first bytes are others")
    if version != VERSION or record_bytes != RECORD_BYTES:
        raise RingVersionError(
            f"a ring of version {version} with records of {record_bytes} bytes; known here: version {VERSION}, {RECORD_BYTES} bytes"
        )
    if capacity < 1 or len(buffer) < ring_bytes(capacity):
        raise RingFormatError(f"the ring says {capacity} records, its {len(buffer)} bytes cannot hold them")
    return RingHeader(rank=rank, attempt=attempt, pid=pid, world_size=world_size, start_time_ns=start_time_ns, capacity=capacity)


# Packing, one pair a record, from and to its fields. The kind is the position in _KINDS.


def _text(text: str, room: int) -> bytes:
    """UTF-8 cut to `room` bytes, never in the middle of a character."""
    return text.encode("utf-8", "replace")[:room].decode("utf-8", "ignore").encode()


def _pack_key(key_id: int, name: str, low: float, high: float) -> bytes:
    written = _text(name, _PAYLOAD_BYTES - _KEY.size)
    return _KEY.pack(key_id, len(written), low, high) + written


def _unpack_key(payload: bytes) -> KeyNamed:
    key_id, length, low, high = _KEY.unpack_from(payload)
    return KeyNamed(key_id=key_id, name=payload[_KEY.size : _KEY.size + length].decode("utf-8", "replace"), low=low, high=high)


def _pack_tensor(
    key_id: int,
    dtype: str,
    step: int,
    micro_step: int,
    low: float,
    high: float,
    negatives: int,
    ignored: int,
    finite: bool,
    shape: tuple[int, ...],
) -> bytes:
    shape = shape[:MAX_DIMENSIONS] if len(shape) > MAX_DIMENSIONS else shape
    dimensions = len(shape)
    return _TENSOR[dimensions].pack(
        key_id, _DTYPE_CODE.get(dtype, len(_DTYPES) - 1), dimensions, step, micro_step, low, high, negatives, ignored, finite, *shape
    )


def _unpack_tensor(payload: bytes) -> TensorSeen:
    key_id, dtype, _, step, micro_step, low, high, negatives, ignored, finite, *shape = _TENSOR[payload[_NUM_DIMENSIONS_AT]].unpack(payload)
    return TensorSeen(key_id, _DTYPES[dtype], step, micro_step, low, high, negatives, ignored, finite, tuple(shape))


def _pack_note(level: int, time_ns: int, text: str) -> bytes:
    return _NOTE.pack(level, time_ns) + _text(text, _PAYLOAD_BYTES - _NOTE.size)


def _unpack_note(payload: bytes) -> Note:
    level, time_ns = _NOTE.unpack_from(payload)
    return Note(level=level, time_ns=time_ns, text=payload[_NOTE.size :].decode("utf-8", "replace"))


def _pack_device(uuid: str) -> bytes:
    return _text(uuid, _PAYLOAD_BYTES)


def _unpack_device(payload: bytes) -> DeviceNamed:
    return DeviceNamed(uuid=payload.decode("utf-8", "replace"))


_KINDS: tuple[tuple[type[Record], Callable[..., bytes], Callable[[bytes], Record]], ...] = (
    (KeyNamed, _pack_key, _unpack_key),
    (TensorSeen, _pack_tensor, _unpack_tensor),
    (MicroStep, _MICRO.pack, lambda payload: MicroStep(*_MICRO.unpack(payload))),
    (StepDone, _STEP.pack, lambda payload: StepDone(*_STEP.unpack(payload))),
    (Note, _pack_note, _unpack_note),
    (DeviceNamed, _pack_device, _unpack_device),
    (TokenizerSeen, _TOKENIZER.pack, lambda payload: TokenizerSeen(*_TOKENIZER.unpack(payload))),
    (GradientsSharded, bytes, lambda _: GradientsSharded()),
)


_PACK: dict[type[Record], tuple[int, Callable[..., bytes]]] = {cls: (kind, pack) for kind, (cls, pack, _) in enumerate(_KINDS)}


def _unpack(kind: int, payload: bytes) -> Record | None:
    if kind >= len(_KINDS):
        return None  # a kind of a newer writer
    try:
        return _KINDS[kind][2](payload)
    except (struct.error, IndexError):
        return None
