"""What the guard found in a batch, as words that rank, node process and daemon share. Field names are those of incident.json.

Owns these dataclasses; `messages.py` takes them into its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["KEPT_BATCH", "BatchFact", "BoundFact", "Derived", "Number", "Sample", "Violation"]

KEPT_BATCH = "loss.batch"  # a Violation's kind that is no finding: the batch of a loss that is not finite, for the incident of that loss

Number: TypeAlias = int | float | str | None  # a str only for values JSON has no number for: "nan", "inf", "-inf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Where in the data the offending element came from; `dataset_index` is None for iterable sets."""

    position_in_batch: int | None = None
    dataset_index: int | None = None
    worker: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """The index that the model computes from the batch, and how, in words: `cumsum(input_ids != 1) + 1`."""

    expression: str
    value: Number = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFact:
    """The offending tensor of the batch. `element` is the index of the first offending element, `value` the value there, `count` how many offend."""

    key: str
    element: tuple[int, ...] | None = None
    value: Number = None
    count: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = "cpu"
    derived: Derived | None = None
    sample: Sample | None = None
    also: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundFact:
    """The bound that was broken; `low` and `high` are inclusive, `source` is `file:line` of the code that consumes the index."""

    low: Number = None
    high: Number = None
    ignored: tuple[int | float, ...] = ()
    op: str = ""
    module: str | None = None
    source: str | None = None
    learned_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One batch that the model cannot take. `repairable`: legal values can stand in, so that the collectives of the step stay whole.

    `bundle`: the batch itself, as a file of the run directory by its path there; empty where it was not kept. `culprit`: the rank whose doing it is,
    where that is known not to be the one that found it.
    """

    kind: str
    summary: str
    cause: str
    fix: str
    batch: BatchFact
    bound: BoundFact | None = None
    severity: Literal["warning", "critical"] = "critical"
    repairable: bool = True
    bundle: str = ""
    culprit: int | None = None
