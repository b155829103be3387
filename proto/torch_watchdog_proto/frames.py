"""Messages as length-prefixed JSON frames: the language of the unix socket between a rank and its node process.

Owns the JSON form of every control message and nothing else. JSON of the standard library, because the rank must need neither protobuf nor
gRPC, and nothing is ever unpickled. Every size is bounded; a malformed frame raises `FrameError` and names what was wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import struct
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch_watchdog_proto import messages

__all__ = ["MAX_FRAME_BYTES", "Decoder", "FrameError", "encode", "from_json", "to_json"]

MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("!I")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_T = TypeVar("_T")
_TYPES: dict[str, type[Any]] = {cls.__name__: cls for union in (messages.RankMessage, messages.Order) for cls in typing.get_args(union)}


class FrameError(ValueError):
    """Bytes that are no frame of ours: too long, not JSON, an unknown message or a field of the wrong type."""


def encode(message: messages.RankMessage | messages.Order) -> bytes:
    """One frame. Raises FrameError where the message is larger than MAX_FRAME_BYTES."""
    body = json.dumps({"type": type(message).__name__, **to_json(message)}, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a {type(message).__name__} of {len(body)} bytes is larger than a frame may be ({MAX_FRAME_BYTES})")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Bytes in any pieces go in, whole messages come out. After a FrameError the connection must be closed: its place in the stream is lost."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[messages.RankMessage | messages.Order]:
        """All messages that are complete by now. Raises FrameError."""
        self._pending += data
        return list(self._complete())

    def _complete(self) -> Iterator[messages.RankMessage | messages.Order]:
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame announces {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            yield _decode(body)


def _decode(body: bytes) -> messages.RankMessage | messages.Order:
    try:
        value = json.loads(body)
        if _HALF.search(body) is not None:  # Python has such in names of files that are no UTF-8; protobuf would not carry them
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("type") not in _TYPES:
        raise FrameError(f"a frame holds no message that is known here: {str(value)[:80]}")
    message: messages.RankMessage | messages.Order = from_json(_TYPES[value.pop("type")], value)
    return message


def to_json(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, NaN and infinities as strings; everything else as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_json(cls: type[_T], value: Any) -> _T:
    """The dataclass `cls` from its JSON form. Unknown fields are ignored (a newer peer may send more); a missing or wrong one raises FrameError."""
    if not isinstance(value, dict):
        raise FrameError(f"{cls.__name__} must be an object, not {type(value).__name__}")
    known = _hints(typing.cast("Any", cls))
    fields = {name: _convert(hint, value[name], f"{cls.__name__}.{name}") for name, hint in known.items() if name in value}
    try:
        return cls(**fields)
    except TypeError as error:
        raise FrameError(f"{cls.__name__}: {error}") from error


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is typing.Literal:
        return _expect(value in args, value, where, f"one of {args}")
    if origin is tuple:
        _expect(isinstance(value, list), value, where, "a list")
        return tuple(_convert(args[0], item, where) for item in value)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), value)
    return _convert_plain(origin or hint, value, where)


def _convert_union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    problems = []
    for option in args:
        if option is not type(None):
            try:
                return _convert(option, value, where)
            except FrameError as error:
                problems.append(str(error))
    raise FrameError(problems[0] if problems else f"{where} may not be null")


def _convert_plain(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is float:
        _expect(
            (isinstance(value, (int, float)) and not isinstance(value, bool)) or value in ("nan", "inf", "-inf"), value, where, "a number"
        )
        try:
            return float(value)
        except OverflowError as error:  # JSON's integers have no end
            raise FrameError(f"{where} is too large for a number") from error
    if hint is int:
        return _expect(isinstance(value, int) and not isinstance(value, bool), value, where, "an integer")
    if hint is Mapping or (isinstance(hint, type) and issubclass(hint, Mapping)):
        return _expect(isinstance(value, dict), value, where, "an object")
    return _expect(isinstance(value, hint), value, where, hint.__name__)


def _expect(right: bool, value: Any, where: str, what: str) -> Any:
    if not right:
        raise FrameError(f"{where} must be {what}, not {str(value)[:60]!r}")
    return value
