"""What a recorded integer may mean: a version space. Pure.

An integer seen in a trace (the end of an arange, the shape of a view, the number of classes) may be a constant, a size of the batch, a size
plus a constant, a product ... Every reading that fits is kept; each further trace removes the readings that do not fit it. Where the readings
that remain disagree about a new batch, nobody knows, and that batch is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

from torch_watchdog_agent.contract.bounds import BIG

__all__ = ["AmbiguousSizeError", "Reading", "Shapes", "Size", "fresh", "merged", "readings_say", "resolved"]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Reading: TypeAlias = tuple[Any, ...]
MAX_LEAVES_READ = 64


class AmbiguousSizeError(Exception):
    """The readings of a recorded size disagree about this batch."""


class Size:
    """All readings of one recorded integer that are consistent with every trace so far."""

    __slots__ = ("readings",)

    def __init__(self, readings: frozenset[Reading]) -> None:
        self.readings = readings

    def __repr__(self) -> str:
        return f"Size({sorted(map(str, self.readings))})"


def fresh(value: int, shapes: Shapes, inputs: Sequence[tuple[int, ...]] = ()) -> Size:
    """Every reading of `value` in a batch of these shapes, beside a node whose inputs have those shapes."""
    found: set[Reading] = {("constant", value)}
    if 0 <= value < BIG:
        for key in list(shapes)[:MAX_LEAVES_READ]:
            found.update(_batch_readings(value, key, shapes[key]))
        for place, shape in enumerate(inputs):
            found.update(_input_readings(value, place, shape))
    return Size(frozenset(found))


def _batch_readings(value: int, key: str, shape: tuple[int, ...]) -> Iterator[Reading]:
    for dim, length in enumerate(shape):
        yield ("size", key, dim, value - length)
        if length and value > length and value % length == 0:
            yield ("times", key, dim, value // length)
        if length > value > 1 and length % value == 0:
            yield ("part", key, dim, length // value)
        for other in range(dim + 1, len(shape)):
            if value and value == length * shape[other]:
                yield ("product", key, dim, other, 0)
            if value > 2 and value == length * (shape[other] - 1):
                yield ("product", key, dim, other, 1)


def _input_readings(value: int, place: int, shape: tuple[int, ...]) -> Iterator[Reading]:
    for dim, length in enumerate(shape):
        yield ("input", place, dim, value - length)
        if dim and prod(shape[: dim + 1]) == value:
            yield ("input product", place, dim)


def _evaluated(reading: Reading, shapes: Shapes, inputs: Sequence[tuple[int, ...]]) -> int:
    match reading:
        case ("constant", value):
            return int(value)
        case ("size", key, dim, offset):
            return int(shapes[key][dim] + offset)
        case ("times", key, dim, factor):
            return int(shapes[key][dim] * factor)
        case ("part", key, dim, factor):
            return int(shapes[key][dim] // factor)
        case ("product", key, dim, other, less):
            return int(shapes[key][dim] * (shapes[key][other] - less))
        case ("input", place, dim, offset):
            return int(inputs[place][dim] + offset)
        case ("input product", place, dim):
            return prod(inputs[place][: dim + 1])
    raise AssertionError(reading)


def readings_say(size: Size, shapes: Shapes, inputs: Sequence[tuple[int, ...]] = ()) -> dict[int, list[Reading]]:
    """What each reading says about this batch, by value; readings of tensors that are not there say nothing."""
    said: dict[int, list[Reading]] = {}
    for reading in size.readings:
        try:
            said.setdefault(_evaluated(reading, shapes, inputs), []).append(reading)
        except (KeyError, IndexError):
            continue
    return said


def resolved(size: Size, shapes: Shapes, inputs: Sequence[tuple[int, ...]] = ()) -> int:
    """The one value on which all readings agree, or AmbiguousSizeError."""
    said = readings_say(size, shapes, inputs)
    if len(said) != 1:
        raise AmbiguousSizeError(f"the readings say {sorted(said)}")
    return next(iter(said))


def merged(one: Size, other: Size) -> Size:
    """The readings that fit both traces; none left: the integer depends on data, not on shapes."""
    return Size(one.readings & other.readings)
