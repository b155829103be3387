"""A job's timeline as text: a strip per rank that fits into 80 columns, then what was found.

Pure: tracks and incidents in, lines out, each a list of (text, style) so that a terminal may colour them and a pipe gets the same words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from torch_watchdog.job.incident import is_order
from torch_watchdog.launch.record import resumed_from
from torch_watchdog.phrases import count, is_good, one_line, what_happened, who
from torch_watchdog.report.counting import told, updates_beside
from torch_watchdog.report.steps import RankTrack
from torch_watchdog.report.strip import MARKS, MEANINGS, cells_of, shown_range

__all__ = ["Line", "duration", "folded", "plain", "render_comparison", "render_timeline"]

Line: TypeAlias = list[tuple[str, str]]  # words and the style that a terminal gives them ("" for none)

WIDTH = 80  # of a pipe, too
_MOST_CELLS, _LEAST_CELLS = 60, 20
MAX_STRIPS = 64  # more ranks are shown in groups
_STYLES = {".": "", "e": "cyan", "w": "yellow", "~": "yellow", "v": "magenta", "!": "yellow", "X": "bold red", " ": ""}
_GOOD = "+"  # of an order, which no cell shows: it is no step's
_SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow"}


def render_timeline(
    job: Mapping[str, Any], tracks: Sequence[RankTrack], incidents: Sequence[Mapping[str, Any]], *, width: int = WIDTH
) -> list[Line]:
    """`job` is job.json; a rank shown twice ran in two attempts of the launcher. Strips are as wide as the figures beside them leave room."""
    lines: list[Line] = [[(line, "")] for line in _headlines(job, tracks)]
    if not tracks:
        lines.append([("no rank has reported a step", "")])
    else:
        first, last = shown_range(tracks, incidents)
        strips = _Strips(tracks, incidents, first=first, last=last, width=width)
        lines += strips.lines()
        lines += [[(line, "dim")] for line in strips.axis()]
        lines += [[(line, "dim")] for line in (_legend(strips.marks, incidents), strips.attempts(), _phases(tracks)) if line]
    return lines + _findings(incidents)


def plain(line: Line) -> str:
    """Without its styles."""
    return "".join(text for text, _ in line).rstrip()


def folded(text: str, width: int) -> list[tuple[int, int, int]]:
    """The lines that it takes at that width: indent, begin and end of each. Cut between words only, and a line to type is never cut: it is copied whole."""
    label = re.match(r"\s*(?:\S+(?: \S+)?\s{2,})?", text)
    indent = min(label.end() if label else 0, width // 2)
    lines = [(0, 0, 0)]
    for word in re.finditer(r"\S+", text):
        before, begin, _ = lines[-1]
        if before + word.end() - begin > width and word.start() > indent and not re.match(r"\s*(resume|again|next) ", text):
            lines.append((indent, word.start(), word.end()))
        else:
            lines[-1] = (before, begin, word.end())
    return lines


def _headlines(job: Mapping[str, Any], tracks: Sequence[RankTrack]) -> list[str]:
    parts = [f"job {job.get('job', '?')}", count(len({track.rank for track in tracks}), "rank")]
    parts += [told(tracks)] if tracks else []
    parts += [f"resumed from {before}"] if (before := resumed_from(job)) else []
    seconds = _seconds_between(job.get("started"), job.get("ended"))
    if seconds is not None:
        parts.append(f"{seconds:.0f} s")
    code = job.get("exit_code")
    reason = f" ({job['exit_reason']})" if job.get("exit_reason") else ""  # only the launch's own record has it
    again = f"ended, and the launcher started attempt {job['started_again']}" if job.get("started_again") else None
    ended = (again or job.get("exit_reason") or "not ended") if code is None else f"exit code {code}{reason}"
    return [one_line(", ".join(parts)), one_line(ended)]


def _seconds_between(start: str | None, end: str | None) -> float | None:
    try:
        return None if not start or not end else (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError):  # no times, or one without its zone
        return None


class _Strips:
    """A line a rank; where there are too many those without anything to tell are shown in groups."""

    def __init__(self, tracks: Sequence[RankTrack], incidents: Sequence[Mapping[str, Any]], *, first: int, last: int, width: int) -> None:
        self._tracks, self._incidents, self._first, self._last = tracks, incidents, first, last
        self._several = len({track.attempt for track in tracks}) > 1
        beside = [(_name(track.rank, track.attempt, self._several), _figures(track)) for track in tracks]
        self._name_width = max(8, *(len(name) for name, _ in beside))
        room = width - self._name_width - max(len("(1000 steps a cell)"), *(len(figures) for _, figures in beside)) - 3
        self._num_cells = min(_MOST_CELLS, max(_LEAST_CELLS, room))
        self._rows = self._alone_and_groups()
        self._name_width = max(self._name_width, *(len(name) for name, _, _ in self._rows))

    @property
    def marks(self) -> set[str]:
        return {mark for _, cells, _ in self._rows for mark in cells}

    def lines(self) -> list[Line]:
        return [
            [(f"{name:<{self._name_width}}|", ""), *[(cell, _STYLES[cell]) for cell in cells.ljust(self._drawn)], (f"| {figures}", "")]
            for name, cells, figures in self._rows
        ]

    @property
    def _per_cell(self) -> int:
        return max(1, math.ceil((self._last - self._first + 1) / self._num_cells))

    @property
    def _drawn(self) -> int:
        """Few steps fill few cells; the axis needs some."""
        return max(_LEAST_CELLS, math.ceil((self._last - self._first + 1) / self._per_cell))

    def attempts(self) -> str:
        """How to read the names, where there are several."""
        rank, newest = self._tracks[-1].rank, self._tracks[-1].attempt
        return f"rank {rank}.{newest} is rank {rank} in attempt {newest} of the launcher, whose first is 0" if self._several else ""

    def axis(self) -> list[str]:
        """The steps of this launch, and the updates that the model had before them where those are other numbers."""
        unit = "1 step" if self._per_cell == 1 else f"{self._per_cell} steps"
        lines = [self._ends("step", self._first, self._last, f"({unit} a cell)")]
        beside = updates_beside(self._tracks, self._first, self._last)
        if beside is not None:
            of = f", attempt {self._tracks[-1].attempt}" if self._several else ""
            lines.append(self._ends("updates", *beside, f"(before the step{of})"))
        return lines

    def _ends(self, what: str, first: int, last: int, note: str) -> str:
        place = min(self._drawn, math.ceil((self._last - self._first + 1) / self._per_cell))
        gap = max(1, place - len(str(first)) - len(str(last)))
        return f"{f'{what:<{self._name_width}} {first}' + ' ' * gap + str(last):<{self._name_width + self._drawn + 2}} {note}"

    def _alone_and_groups(self) -> list[tuple[str, str, str]]:
        """Name, cells and figures."""
        found = [(track, cells_of(track, self._first, self._last, self._incidents, self._num_cells)) for track in self._tracks]
        alone = [pair for pair in found if len(found) <= MAX_STRIPS or set(pair[1]) & {"X", "!"}][:MAX_STRIPS]
        shown = {id(track) for track, _ in alone}
        rows = [(_name(track.rank, track.attempt, self._several), cells, _figures(track)) for track, cells in alone]
        return rows + _groups([pair for pair in found if id(pair[0]) not in shown], self._several)


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


def _figures(track: RankTrack) -> str:
    parts = [count(len(track.steps), "step")]
    losses = [track.loss[step] for step in sorted(track.loss)]
    if losses:
        parts.append(f"loss {_short(losses[0])} to {_short(losses[-1])}")
    if track.median_step_s is not None:
        parts.append(duration(track.median_step_s))
    return ", ".join(parts)


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else str(value)


def duration(seconds: float) -> str:
    """Of a step: `4.95 ms`, `1.2 s`."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _legend(marks: set[str], incidents: Sequence[Mapping[str, Any]]) -> str:
    """Of the marks that are there, in the strips or before what was found, so that it fits."""
    there = marks | {_mark_of(incident) for incident in incidents}
    return "  ".join(f"{mark} {words}" for mark, words in (MEANINGS | {_GOOD: "asked for, and good"}).items() if mark in there)


def _phases(tracks: Sequence[RankTrack]) -> str:
    """Where the time of the steps went, over all ranks. What a GPU does while its loop waits or runs ahead is not told apart."""
    whole, loader, forward, backward, update = (
        sum(sum(times.values()) for times in column)
        for column in zip(
            *((one.duration_ns, one.loader_ns(), one.forward_ns(), one.backward_ns, one.update_ns) for one in tracks), strict=True
        )
    )
    if not whole or not (loader or forward):
        return ""
    if not forward or not backward or any(track.gpu for track in tracks):
        untold = "backward, waiting, update and the loop itself" if forward else "the rest"
        parts = [("loading", loader), ("forward", forward), (untold, whole - loader - forward)]
    else:
        rest = [("backward and waiting", backward - update), ("update", update)] if update else [("backward, waiting and update", backward)]
        parts = [("loading", loader), ("forward", forward), *rest, ("the loop itself", whole - loader - forward - backward)]
    return "time: " + ", ".join(f"{words} {value / whole:.0%}" for words, value in parts if value > 0)


def _findings(incidents: Sequence[Mapping[str, Any]]) -> list[Line]:
    lines: list[Line] = []
    for incident in sorted(incidents, key=lambda incident: str(incident.get("time", ""))):
        style = _SEVERITY_STYLES.get(str(incident.get("severity")), "")
        lines.append([(f"{_mark_of(incident)} {_clock(incident)} {incident.get('kind')}: {one_line(who(incident))}", style)])
        lines.append([(f"    {one_line(what_happened(incident))}", "")])
    return lines


def _mark_of(incident: Mapping[str, Any]) -> str:
    """As in the strips; what somebody asked for and got is none of their findings."""
    if is_order(incident) and is_good((incident.get("action") or {}).get("checkpoint") or {}):
        return _GOOD
    return "X" if incident.get("severity") == "critical" else "!"


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
        if values == [None, None]:
            continue
        one, two = (_figure(name, value) for value in values)
        lines.append([(f"{name:<18}{one:>24}  {two:>24}", "" if one == two else "yellow")])
    return [*lines, *([(line, "")] for line in _parting(found["loss"], names))]


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "median step":
        return duration(value)
    if name == "waiting for data":
        return f"{value:.1%}"
    if name == "peak memory":
        return f"{value / 2**20:.0f} MiB"
    return _short(value) if isinstance(value, float) else str(value)


def _follows(spans: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    for one, other in ((0, 1), (1, 0)):
        if spans[one][1] + 1 == spans[other][0]:
            return f": {names[other]} goes on where {names[one]} ended"
    return ""


def _parting(loss: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """How the two were laid beside each other, then where their losses part."""
    spans, by_updates = loss["spans"], loss["aligned_by"] == "updates"
    if None in spans:
        return ["no step of both has a loss"]
    what = "updates before the step" if by_updates else "step"
    how = " and ".join(f"{name} {first} to {last}" for name, (first, last) in zip(names, spans, strict=True))
    lines = [f"compared by {what}: {how}"]
    if not loss["common_steps"]:
        return [*lines, f"they have no step in common{_follows(spans, names)}"]
    if loss["first_difference_at_step"] is None:
        return [*lines, f"the losses are the same in all {count(loss['common_steps'], 'common step')}"]
    one, two = loss["last_common_losses"]
    places = (loss[name] for name in ("first_difference_at_step", "last_common_step"))
    parted, last = (f"after {count(place, 'update')}" if by_updates else f"at step {place}" for place in places)
    return [*lines, f"the losses part {parted}; {last} they are {_figure('', one)} and {_figure('', two)}"]
