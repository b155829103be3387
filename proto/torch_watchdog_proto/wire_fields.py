"""One dataclass <-> one protobuf message, field by field, after the dataclass's own type hints.

Owns the conventions (a protobuf field named `X_delta` holds X as differences, `X_json` as JSON text, `X_s` are seconds) and the bounds: every text, list,
column and number has a limit, columns that belong together have one length. Knows no particular message but those of steps; `codec.py` knows them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_watchdog_proto.step_words import BLOCK_COLUMNS, MICRO_COLUMNS, STEP_COLUMNS, TENSOR_COLUMNS, StepBlock, StepTable, TensorColumns

__all__ = ["MAX_ITEMS", "MAX_TEXT", "MalformedMessageError", "read_fields", "write_fields"]

MAX_TEXT = 64 << 10  # characters of one text
MAX_JSON = 1 << 20  # characters of one JSON text: a manifest names every file of every rank
MAX_ITEMS = 64 << 10  # entries of one list or column
MAX_WORLD = MAX_ITEMS  # ranks: a list can name them all
MAX_SECONDS = 1e14  # more than any timedelta, which process groups are given
_INT64 = range(-(1 << 63), 1 << 63)
_COUNTED = ("step", "micro_of_step", "micro_step", "updates_applied")
_LARGEST = 1 << 62  # of counts, bytes and nanoseconds: two of them can be added in 64 bits, and a data base can keep them


class MalformedMessageError(ValueError):
    """A message that does not keep the contract: too long, columns of different lengths, an unknown word, a value out of its type's range."""


def write_fields(message: Any, value: Any) -> None:
    """Fills the protobuf message from the dataclass. Raises MalformedMessageError; protobuf's own ValueError and TypeError for a value out of range."""
    _check_value(value)
    for field in _fields(value.__class__, message.__class__):
        item = getattr(value, field.name)
        if item is not None:
            field.write(message, item)


def read_fields(cls: Any, message: Any, **more: Any) -> Any:
    """The dataclass `cls` from the protobuf message; `more` are fields that the message does not carry."""
    value = cls(**{field.name: field.read(message) for field in _fields(cls, message.__class__)}, **more)
    _check_value(value)
    return value


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


@functools.cache  # for mypy `type[Any]` is not hashable, so callers hand over Any
def _fields(cls: Any, message: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls)
    known = set(message.DESCRIPTOR.fields_by_name)
    found = (_field(field.name, hints[field.name], known) for field in dataclasses.fields(cls))
    return tuple(field for field in found if field is not None)


def _field(name: str, hint: Any, known: set[str]) -> _Field | None:
    if name == "shapes":
        return _Field(name, _write_shapes, _read_shapes)
    if f"{name}_delta" in known:
        return _delta_field(name)
    if f"{name}_json" in known:
        return _json_field(name, many=typing.get_origin(hint) is tuple)
    # What the message leaves out on purpose: the rank (its envelope names it).
    return _plain_field(name, hint) if name in known else None


def _delta_field(name: str) -> _Field:
    column = f"{name}_delta"

    def write(message: Any, values: Iterable[int]) -> None:
        padded = (0, *_whole(_bounded(tuple(values), name), name))
        getattr(message, column).extend(after - before for before, after in itertools.pairwise(padded))

    return _Field(name, write, lambda message: _whole(tuple(itertools.accumulate(_bounded(getattr(message, column), name)[:])), name))


def _json_field(name: str, *, many: bool) -> _Field:
    column = f"{name}_json"

    def write(message: Any, value: Any) -> None:
        if many:
            getattr(message, column).extend(_json_text(item, name) for item in _bounded(value, name))
        else:
            setattr(message, column, _json_text(value, name))

    def read(message: Any) -> Any:
        found = getattr(message, column)
        return tuple(_json_object(text, name) for text in _bounded(found, name)) if many else _json_object(found, name)

    return _Field(name, write, read)


def _json_text(value: Any, name: str) -> str:
    return _text(json.dumps(value, separators=(",", ":"), allow_nan=False), name, MAX_JSON)


def _json_object(text: str, name: str) -> Mapping[str, Any]:
    value = json.loads(_text(text, name, MAX_JSON)) if text else {}
    if not isinstance(value, dict):
        raise MalformedMessageError(f"{name} must be a JSON object, not {type(value).__name__}")
    return value


def _write_shapes(message: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    message.ndim.extend(len(shape) for shape in _bounded(shapes, "shapes"))
    message.dims.extend(itertools.chain.from_iterable(shapes))


def _read_shapes(message: Any) -> tuple[tuple[int, ...], ...]:
    ndim, dims = _bounded(message.ndim, "ndim")[:], message.dims[:]
    if sum(ndim) != len(dims):
        raise MalformedMessageError(f"shapes announce {sum(ndim)} sizes, {len(dims)} are there")
    sizes = iter(dims)
    if ndim and min(ndim) == max(ndim) > 0:  # nearly all of them
        return tuple(zip(*(sizes,) * ndim[0], strict=True))
    return tuple([tuple(itertools.islice(sizes, count)) for count in ndim])


def _plain_field(name: str, hint: Any) -> _Field:
    options, optional = _options(hint)
    if options == (int, float, str):
        return _Field(name, lambda m, v: _write_number(getattr(m, name), v), lambda m: _read_number(getattr(m, name)))
    (kind,) = options
    if typing.get_origin(kind) is tuple:
        return _element_field(name) if optional else _list_field(name, typing.get_args(kind)[0])
    if dataclasses.is_dataclass(kind):
        return _message_field(name, typing.cast("type[Any]", kind), optional)
    return _scalar_field(name, kind, optional)


def _options(hint: Any) -> tuple[tuple[Any, ...], bool]:
    """What a value may be, without None, and whether None is allowed."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return (hint,), False
    args = typing.get_args(hint)
    return tuple(arg for arg in args if arg is not type(None)), type(None) in args


def _scalar_field(name: str, kind: Any, optional: bool) -> _Field:
    words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()

    def check(value: Any) -> Any:
        if words and value not in words:
            raise MalformedMessageError(f"{name} must be one of {words}, not {str(value)[:40]!r}")
        if isinstance(value, str):
            return _text(value, name)
        if name.endswith("_s") and not -MAX_SECONDS <= value <= MAX_SECONDS:  # nor is NaN
            raise MalformedMessageError(f"{name} must be seconds, {MAX_SECONDS:.0f} at most, not {value}")
        if name == "world_size" and value > MAX_WORLD:
            raise MalformedMessageError(f"{name} is {value}, at most {MAX_WORLD} ranks are watched")
        return _whole((value,), name)[0] if kind is int else value

    def read(message: Any) -> Any:
        return None if optional and not message.HasField(name) else check(getattr(message, name))

    return _Field(name, lambda message, value: setattr(message, name, check(value)), read)


def _message_field(name: str, cls: type[Any], optional: bool) -> _Field:
    def write(message: Any, value: Any) -> None:
        getattr(message, name).SetInParent()
        write_fields(getattr(message, name), value)

    def read(message: Any) -> Any:
        if optional and not message.HasField(name):
            return None
        return read_fields(cls, getattr(message, name))

    return _Field(name, write, read)


def _list_field(name: str, item: Any) -> _Field:
    if dataclasses.is_dataclass(item):
        cls = typing.cast("type[Any]", item)
        return _each_field(name, write_fields, lambda message: read_fields(cls, message))
    if _options(item)[0] == (int, float):
        return _each_field(name, _write_number, _read_number)

    def checked(values: Any) -> Any:
        if item is str:
            return tuple(_text(value, name) for value in _bounded(values, name))
        values = tuple(_bounded(values, name)[:])  # all of them at once, for protobuf hands out one after the other more slowly
        return _whole(values, name) if item is int else values

    return _Field(name, lambda m, values: getattr(m, name).extend(checked(values)), lambda m: checked(getattr(m, name)))


def _each_field(name: str, write_one: Callable[[Any, Any], None], read_one: Callable[[Any], Any]) -> _Field:
    def write(message: Any, values: Any) -> None:
        for value in _bounded(values, name):
            write_one(getattr(message, name).add(), value)

    return _Field(name, write, lambda message: tuple(read_one(item) for item in _bounded(getattr(message, name), name)))


def _element_field(name: str) -> _Field:
    def write(message: Any, value: tuple[int, ...]) -> None:
        getattr(message, name).SetInParent()
        getattr(message, name).index.extend(_bounded(value, name))

    def read(message: Any) -> Any:
        return tuple(_bounded(getattr(message, name).index, name)) if message.HasField(name) else None

    return _Field(name, write, read)


def _write_number(message: Any, value: int | float | str) -> None:
    if isinstance(value, str):
        message.word = _text(value, "number")
    elif isinstance(value, float):
        message.real = value
    elif value in _INT64:
        message.integer = value
    else:
        message.big = _text(str(value), "number")


def _read_number(message: Any) -> Any:
    kind = message.WhichOneof("is")
    if kind is None:
        return None
    value = getattr(message, kind)
    return int(_text(value, "number")) if kind == "big" else value


# Bounds


def _bounded(values: Any, name: str) -> Any:
    if len(values) > MAX_ITEMS:
        raise MalformedMessageError(f"{name} has {len(values)} entries, at most {MAX_ITEMS} are allowed")
    return values


def _whole(values: tuple[int, ...], name: str) -> tuple[int, ...]:
    if values and not -_LARGEST <= min(values) <= max(values) <= _LARGEST:
        raise MalformedMessageError(f"{name} is beyond {_LARGEST}")
    return values


def _text(text: str, name: str, most: int = MAX_TEXT) -> str:
    if len(text) > most:
        raise MalformedMessageError(f"{name} has {len(text)} characters, at most {most} are allowed")
    return text


def _check_value(value: Any) -> None:
    """What no single field can tell: columns that belong together have one length (or are absent: an older peer), rows point into the block."""
    if isinstance(value, StepBlock):
        _check_steps(value, len(value.micro_step), len(value.step))
    elif isinstance(value, StepTable):
        for name in (*BLOCK_COLUMNS, "num_micro_steps", "num_steps"):
            _check_length(value, name, (len(value.rank),))
        _check_length(value, "micro_step", (sum(value.num_micro_steps),))
        _check_length(value, "step", (sum(value.num_steps),))
        _check_steps(value, len(value.micro_step), len(value.step))
    elif isinstance(value, TensorColumns):
        for name in TENSOR_COLUMNS:
            _check_length(value, name, (0, len(value.rows)))


def _check_steps(value: StepBlock | StepTable, micro: int, steps: int) -> None:
    for name in MICRO_COLUMNS:
        _check_length(value, name, (0, micro))
    for name in STEP_COLUMNS:
        _check_length(value, name, (0, steps))
    for name in _COUNTED:
        if min(getattr(value, name), default=0) < 0:
            raise MalformedMessageError(f"column {name} has {min(getattr(value, name))}: it counts from 0")
    if any(value.loss_known):
        _check_length(value, "loss", (micro,))
    for tensor in value.tensors:
        if tensor.rows and not 0 <= min(tensor.rows) <= max(tensor.rows) < micro:
            raise MalformedMessageError(f"{tensor.key[:80]}: a row is not one of the {micro} micro-steps")


def _check_length(value: Any, name: str, allowed: tuple[int, ...]) -> None:
    if len(getattr(value, name)) not in allowed:
        raise MalformedMessageError(f"column {name} has {len(getattr(value, name))} entries where {allowed[-1]} belong")
