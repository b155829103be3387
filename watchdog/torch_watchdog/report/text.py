"""A job's timeline as text: a strip per rank that fits into 80 columns, then what was found.

Pure: tracks and incidents in, lines out, each a list of (text, style) so that a terminal may colour them and a pipe gets the same words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from torch_watchdog.launch.summary import count, one_line, who
from torch_watchdog.report.steps import RankTrack
from torch_watchdog.report.strip import MARKS, MEANINGS, cells_of, shown_range

__all__ = ["Line", "folded", "plain", "render_comparison", "render_timeline"]

Line: TypeAlias = list[tuple[str, str]]  # words and the style that a terminal gives them ("" for none)

STRIP_CELLS = 36
WIDTH = 80
MAX_STRIPS = 64  # more ranks are shown in groups
_STYLES = {".": "", "e": "cyan", "w": "yellow", "~": "yellow", "v": "magenta", "!": "yellow", "X": "bold red", " ": ""}
_SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow"}


def render_timeline(job: Mapping[str, Any], tracks: Sequence[RankTrack], incidents: Sequence[Mapping[str, Any]]) -> list[Line]:
    """`job` is job.json; a rank shown twice ran in two attempts of the launcher."""
    lines: list[Line] = [[(_headline(job, tracks), "")]]
    if not tracks:
        lines.append([("no rank has reported a step", "")])
    else:
        first, last = shown_range(tracks, incidents)
        strips = _strips(tracks, first, last, incidents)
        width = max(8, *(len(name) for name, _, _ in strips))
        lines += [_strip_line(name.ljust(width), cells, figures) for name, cells, figures in strips]
        lines.append([(_axis(first, last, width), "dim")])
        lines += [[(line, "dim")] for line in (_legend({mark for _, cells, _ in strips for mark in cells}), _phases(tracks)) if line]
    return lines + _findings(incidents)


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def folded(text: str, width: int) -> list[tuple[int, int, int]]:
    """The lines that it takes at that width: indent, begin and end of each. Cut between words only, and a line to type is never cut: it is copied whole."""
    label = re.match(r"\s*(?:\S+(?: \S+)?\s{2,})?", text)
    indent = min(label.end() if label else 0, width // 2)
    lines = [(0, 0, 0)]
    for word in re.finditer(r"\S+", text):
        before, begin, _ = lines[-1]
        if before + word.end() - begin > width and word.start() > indent and not re.match(r"\s*(resume|next) ", text):
            lines.append((indent, word.start(), word.end()))
        else:
            lines[-1] = (before, begin, word.end())
    return lines


def _headline(job: Mapping[str, Any], tracks: Sequence[RankTrack]) -> str:
    parts = [f"job {job.get('job', '?')}", count(len({track.rank for track in tracks}), "rank")]
    seconds = _seconds_between(job.get("started"), job.get("ended"))
    if seconds is not None:
        parts.append(f"{seconds:.0f} s")
    code = job.get("exit_code")
    parts.append("not ended" if code is None else f"exit code {code} ({job.get('exit_reason')})")
    return one_line(", ".join(parts))


def _seconds_between(start: str | None, end: str | None) -> float | None:
    try:
        return None if not start or not end else (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError):  # no times, or one without its zone
        return None


def _strips(tracks: Sequence[RankTrack], first: int, last: int, incidents: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Name, cells and figures of each line; where there are too many ranks those without anything to tell are shown in groups."""
    several = len({track.attempt for track in tracks}) > 1
    found = [(track, cells_of(track, first, last, incidents, STRIP_CELLS)) for track in tracks]
    alone = [pair for pair in found if len(tracks) <= MAX_STRIPS or set(pair[1]) & {"X", "!"}][:MAX_STRIPS]
    shown = {id(track) for track, _ in alone}
    lines = [(_name(track.rank, track.attempt, several), cells, _figures(track)) for track, cells in alone]
    return lines + _groups([pair for pair in found if id(pair[0]) not in shown], several)


def _groups(found: Sequence[tuple[RankTrack, str]], several: bool) -> list[tuple[str, str, str]]:
    size = max(1, math.ceil(len(found) / MAX_STRIPS))
    lines = []
    for start in range(0, len(found), size):
        group = found[start : start + size]
        ranks = [track.rank for track, _ in group]
        cells = "".join(max(column, key=MARKS.index) for column in zip(*(cells for _, cells in group), strict=True))
        name = f"{min(ranks)}-{max(ranks)}" + (f".{group[0][0].attempt}" if several else "") + " "
        lines.append((name, cells, f"{count(len(group), 'rank')}, the gravest of each"))
    return lines


def _name(rank: int, attempt: int, several: bool) -> str:
    """The attempt is told only where there are several."""
    return f"rank {rank}.{attempt} " if several else f"rank {rank} "


def _strip_line(name: str, cells: str, figures: str) -> Line:
    room = max(0, WIDTH - len(name) - STRIP_CELLS - 3)
    return [(f"{name}|", ""), *[(cell, _STYLES[cell]) for cell in cells.ljust(STRIP_CELLS)], (f"| {figures[:room]}", "")]


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


def _legend(marks: set[str]) -> str:
    """Of the marks that are there, so that it fits."""
    return "  ".join(f"{mark} {words}" for mark, words in MEANINGS.items() if mark in marks)


def _phases(tracks: Sequence[RankTrack]) -> str:
    """Where the time of the steps went, over all ranks."""
    whole = sum(sum(track.duration_ns.values()) for track in tracks)
    loader = sum(sum(track.loader_ns().values()) for track in tracks)
    forward = sum(sum(track.forward_ns().values()) for track in tracks)
    if not whole or not (loader or forward):
        return ""
    rest = max(0, whole - loader - forward)
    parts = [("loading", loader), ("forward", forward), ("backward, waiting and update" if forward else "the rest", rest)]
    return "time: " + ", ".join(f"{words} {value / whole:.0%}" for words, value in parts if value)


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


def render_comparison(found: Mapping[str, Any]) -> list[Line]:
    """`found` is what `comparison` gives."""
    names = [one_line(name)[:24] for name in found["jobs"]]
    lines: list[Line] = [[(f"{'':<18}{names[0]:>24}  {names[1]:>24}", "bold")]]
    for name, values in found["figures"].items():
        one, two = (_figure(name, value) for value in values)
        lines.append([(f"{name:<18}{one:>24}  {two:>24}", "" if one == two else "yellow")])
    return [*lines, [(_parting(found["loss"]), "")]]


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "median step":
        return _duration(value)
    if name == "waiting for data":
        return f"{value:.1%}"
    if name == "peak memory":
        return f"{value / 2**20:.0f} MiB"
    return _short(value) if isinstance(value, float) else str(value)


def _parting(loss: Mapping[str, Any]) -> str:
    if not loss["common_steps"]:
        return "no step of both has a loss"
    if loss["first_difference_at_step"] is None:
        return f"the losses are the same in all {count(loss['common_steps'], 'common step')}"
    one, two = loss["last_common_losses"]
    apart = f"; at step {loss['last_common_step']} they are {_figure('', one)} and {_figure('', two)}"
    return f"the losses part at step {loss['first_difference_at_step']}{apart}"
