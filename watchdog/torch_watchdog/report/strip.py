"""A rank's steps as a strip of cells, each with the gravest mark of its steps: for the terminal and for pages alike.

Pure. A mark is one character; MEANINGS says in words what each stands for, from the lightest to the gravest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_watchdog.report.steps import RankTrack

__all__ = ["MARKS", "MEANINGS", "cells_of", "shown_range"]

SLOW_RATIO = 2.0
WAIT_SHARE = 0.5
MEANINGS = {
    ".": "trained",
    "e": "evaluated",
    "w": "waited for data",
    "~": "slow (2x median)",
    "v": "no update",
    "!": "finding",
    "X": "fault",
}
MARKS = " " + "".join(MEANINGS)


def shown_range(tracks: Iterable[RankTrack], incidents: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """First and last step to show; a step that never ended, because it was the faulty one, is shown too."""
    steps = [step for track in tracks if track.time_ns for step in (min(track.time_ns), max(track.time_ns))]
    steps += [incident["step"] for incident in incidents if incident.get("step") is not None]
    return (min(steps), max(steps)) if steps else (0, 0)


def cells_of(track: RankTrack, first: int, last: int, incidents: Sequence[Mapping[str, Any]], num_cells: int) -> str:
    """A cell stands for one step, or for as many as make all fit."""
    num_steps = last - first + 1
    per_cell = max(1, -(-num_steps // num_cells))  # rounded up, and exact for numbers that no float holds
    cells = [" "] * -(-num_steps // per_cell)
    marks = _marks_of(track, incidents)
    slow_ns = SLOW_RATIO * 1e9 * (track.median_step_s or math.inf)
    loader = track.loader_ns()
    for step in sorted({*track.time_ns, *(step for step in marks if first <= step <= last)}):
        mark = marks.get(step) or _mark(track, step, slow_ns, loader.get(step, 0))
        cell = (step - first) // per_cell
        cells[cell] = max(cells[cell], mark, key=MARKS.index)
    return "".join(cells)


def _marks_of(track: RankTrack, incidents: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """X where this rank began a critical incident, ! for lesser ones; the loader's rank may have met it at a step that it never ended."""
    marks: dict[int, str] = {}
    for incident in incidents:
        step = incident.get("step")
        if step is None or incident.get("attempt", 0) != track.attempt or (incident.get("origin") or {}).get("rank") != track.rank:
            continue
        mark = "X" if incident.get("severity") == "critical" else "!"
        marks[step] = "X" if "X" in (mark, marks.get(step)) else mark
    return marks


def _mark(track: RankTrack, step: int, slow_ns: float, loader_ns: int) -> str:
    duration_ns = track.duration_ns.get(step, 0)
    if step in track.vetoed:
        return "v"
    if duration_ns > slow_ns:
        return "~"
    if duration_ns and loader_ns > WAIT_SHARE * duration_ns:
        return "w"
    return "e" if step in track.evaluated else "."
