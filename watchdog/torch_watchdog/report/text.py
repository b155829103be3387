"""A job's timeline as text: a strip per rank that fits into 80 columns, then what was found.

Pure: tracks and incidents in, lines out, each a list of (text, style) so that a terminal may colour them and a pipe gets the same words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from torch_watchdog.launch.summary import count, one_line, who
from torch_watchdog.report.steps import RankTrack

__all__ = ["LEGEND", "Line", "plain", "render_timeline"]

Line: TypeAlias = list[tuple[str, str]]  # words and the style that a terminal gives them ("" for none)

STRIP_CELLS = 36
WIDTH = 80
SLOW_RATIO = 2.0
LEGEND = ". trained  e evaluated  ~ slow (2x median)  v no update  ! finding  X fault"
_STYLES = {".": "", "e": "cyan", "~": "yellow", "v": "magenta", "!": "yellow", "X": "bold red", " ": ""}
_SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow"}


def render_timeline(job: Mapping[str, Any], tracks: Sequence[RankTrack], incidents: Sequence[Mapping[str, Any]]) -> list[Line]:
    """`job` is job.json; a rank shown twice ran in two attempts of the launcher."""
    lines = [[(_headline(job, tracks), "")]]
    if not tracks:
        lines.append([("no rank has reported a step", "")])
    else:
        first, last = _range(tracks, incidents)
        names = _names(tracks)
        lines += [_rank_line(name, track, first, last, incidents) for name, track in zip(names, tracks, strict=True)]
        lines.append([(_axis(first, last, len(names[0])), "dim")])
        lines.append([(LEGEND, "dim")])
    return lines + _findings(incidents)


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def _headline(job: Mapping[str, Any], tracks: Sequence[RankTrack]) -> str:
    parts = [f"job {job.get('job', '?')}", count(len({track.rank for track in tracks}), "rank")]
    seconds = _seconds_between(job.get("started"), job.get("ended"))
    if seconds is not None:
        parts.append(f"{seconds:.0f} s")
    code = job.get("exit_code")
    parts.append("not ended" if code is None else f"exit code {code} ({job.get('exit_reason')})")
    return one_line(", ".join(parts))


def _seconds_between(start: str | None, end: str | None) -> float | None:
    return None if not start or not end else (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def _range(tracks: Iterable[RankTrack], incidents: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """First and last step to show; a step that never ended, because it was the faulty one, is shown too."""
    steps = [step for track in tracks for step in (track.steps[:1] + track.steps[-1:])]
    steps += [incident["step"] for incident in incidents if incident.get("step") is not None]
    return (min(steps), max(steps)) if steps else (0, 0)


def _names(tracks: Sequence[RankTrack]) -> list[str]:
    """All of one width; the attempt is told only where there are several."""
    several = len({track.attempt for track in tracks}) > 1
    names = [f"rank {track.rank}.{track.attempt} " if several else f"rank {track.rank} " for track in tracks]
    width = max(8, *map(len, names))
    return [name.ljust(width) for name in names]


def _rank_line(name: str, track: RankTrack, first: int, last: int, incidents: Sequence[Mapping[str, Any]]) -> Line:
    cells = _strip(track, first, last, _marks_of(track, incidents))
    figures = _figures(track)[: WIDTH - len(name) - STRIP_CELLS - 3]
    return [(f"{name}|", ""), *[(cell, _STYLES[cell]) for cell in cells], (f"| {figures}", "")]


def _figures(track: RankTrack) -> str:
    parts = [f"{len(track.steps)} steps"]
    losses = [track.loss[step] for step in sorted(track.loss)]
    if losses:
        parts.append(f"loss {_short(losses[0])}>{_short(losses[-1])}")
    if track.median_step_s is not None:
        parts.append(_duration(track.median_step_s))
    return " ".join(parts)


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


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


def _strip(track: RankTrack, first: int, last: int, marks: Mapping[int, str]) -> str:
    """A cell stands for one step, or for as many as make all fit; the gravest mark in it shows."""
    per_cell = max(1, math.ceil((last - first + 1) / STRIP_CELLS))
    cells = [" "] * math.ceil((last - first + 1) / per_cell)
    slow_ns = SLOW_RATIO * 1e9 * (track.median_step_s or math.inf)
    for step in sorted({*track.time_ns, *(step for step in marks if first <= step <= last)}):
        mark = marks.get(step) or _mark(track, step, slow_ns)
        cell = (step - first) // per_cell
        cells[cell] = max(cells[cell], mark, key=" .e~v!X".index)
    return "".join(cells).ljust(STRIP_CELLS)


def _mark(track: RankTrack, step: int, slow_ns: float) -> str:
    if step in track.vetoed:
        return "v"
    if track.duration_ns.get(step, 0) > slow_ns:
        return "~"
    return "e" if step in track.evaluated else "."


def _axis(first: int, last: int, name_width: int) -> str:
    per_cell = max(1, math.ceil((last - first + 1) / STRIP_CELLS))
    unit = "1 step" if per_cell == 1 else f"{per_cell} steps"
    return f"{'step':<{name_width}} {first:<{STRIP_CELLS - len(str(last))}}{last}  ({unit} a cell)"


def _findings(incidents: Sequence[Mapping[str, Any]]) -> list[Line]:
    lines: list[Line] = []
    for incident in sorted(incidents, key=lambda incident: str(incident.get("time", ""))):
        style = _SEVERITY_STYLES.get(str(incident.get("severity")), "")
        mark = "X" if incident.get("severity") == "critical" else "!"
        lines.append([(f"{mark} {_clock(incident)} {incident.get('kind')}: {one_line(who(incident))}", style)])
        lines.append([(f"    {one_line(str(incident.get('summary', '')))}", "")])
    return lines


def _clock(incident: Mapping[str, Any]) -> str:
    try:
        return datetime.fromisoformat(str(incident.get("time"))).astimezone(UTC).strftime("%H:%M:%SZ")
    except ValueError:
        return "--:--:--"
