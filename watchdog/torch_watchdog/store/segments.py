"""Segment files: append-only frames, each with its length and checksum, so that a torn tail is seen and never believed.

Owns the byte layout of `blocks/*.seg`. A file begins with MAGIC; a frame is length (u32) and crc32 (u32) of the compressed payload, little-endian,
then the payload (zlib). Knows nothing of what a payload says. A writer never continues a file that it did not begin: after a crash the next file
begins, so nothing is ever truncated or rewritten (safe on NFS and Lustre).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["MAGIC", "Frame", "SegmentWriter", "read_frames", "segment_files"]

MAGIC = b"TWSEG\x01\r\n"
MAX_PAYLOAD_BYTES = 64 << 20
_FRAME = struct.Struct("<II")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One payload and where its frame begins and ends in the file."""

    start: int
    end: int
    payload: bytes


class SegmentWriter:
    """Appends payloads to `folder`, beginning a new file at `max_bytes`. Not for two threads at once. Raises OSError; the next call then begins a new file."""

    def __init__(self, folder: Path, *, max_bytes: int = 64 << 20) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._file: BinaryIO | None = None
        self._size = 0

    def append(self, payload: bytes) -> None:
        """Writes one frame with a single write, so that a reader meets at most one torn frame, the last."""
        body = zlib.compress(payload, 1)
        frame = _FRAME.pack(len(body), zlib.crc32(body)) + body
        file = self._file
        if file is None or self._size + len(frame) > self._max_bytes:
            file = self._begin()
        try:
            self._write(file, frame)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the file at hand; the next append begins another."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _begin(self) -> BinaryIO:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        number = max((_number(path) for path in segment_files(self._folder)), default=0) + 1
        file = (self._folder / f"{number:06d}.seg").open("xb", buffering=0)
        try:
            self._size = 0
            self._write(file, MAGIC)
        except OSError:
            file.close()
            raise
        self._file = file
        return file

    def _write(self, file: BinaryIO, data: bytes) -> None:
        written = file.write(data)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written: the disk is full")
        self._size += written


def segment_files(folder: Path) -> tuple[Path, ...]:
    """The segment files of a folder in the order in which they were begun; none where there is no folder."""
    return tuple(sorted((path for path in folder.glob("*.seg") if path.stem.isdigit() and path.is_file()), key=_number))


def _number(path: Path) -> int:
    return int(path.stem)


def read_frames(path: Path, start: int = 0) -> Iterator[Frame]:
    """The whole frames from byte `start` on (0: from the first). Ends at the first torn one, and at once where the file is none of ours."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        position = max(start, len(MAGIC))
        file.seek(position)
        while (frame := _read_frame(file, position)) is not None:
            yield frame
            position = frame.end


def _read_frame(file: BinaryIO, position: int) -> Frame | None:
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(head)
    body = file.read(length) if length <= MAX_PAYLOAD_BYTES else b""
    if len(body) != length or zlib.crc32(body) != checksum:
        return None
    payload = _decompress(body)
    return None if payload is None else Frame(start=position, end=position + _FRAME.size + length, payload=payload)


def _decompress(body: bytes) -> bytes | None:
    stream = zlib.decompressobj()
    try:
        payload = stream.decompress(body, MAX_PAYLOAD_BYTES)
    except zlib.error:
        return None
    return payload if stream.eof else None
