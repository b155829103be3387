"""Readers of a run directory: no daemon needed, a torn tail is no error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_watchdog_proto.messages import StepBlock

__all__ = ["read_blocks", "read_events", "read_incidents", "read_job"]


def read_blocks(run_dir: Path, rank: int | None = None, first_step: int | None = None, last_step: int | None = None) -> Iterator[StepBlock]:
    """The blocks that hold any step of the range (inclusive), in the order in which they came. Nothing where there are none."""
    raise NotImplementedError


def read_events(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """The lines of events.jsonl, oldest first; a line cut short is left out."""
    raise NotImplementedError


def read_incidents(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """The incidents as their JSON objects, by number."""
    raise NotImplementedError


def read_job(run_dir: Path) -> Mapping[str, Any]:
    """job.json. Raises RunDirectoryError where there is none, or it is no JSON."""
    raise NotImplementedError
