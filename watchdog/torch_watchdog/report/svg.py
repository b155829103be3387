"""Drawings for pages, as SVG text: strips of ranks, and a curve with a band.

Pure, and sized by what is shown, never by the length of the run. As wide as the page gives them room: on a phone nothing is cut off or too small to
read. Colours are classes: the page's style sheet knows dark from light. Words of the user's data get in by `escape` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import TypeAlias

from torch_watchdog.phrases import count
from torch_watchdog.report.strip import MEANINGS

__all__ = ["Band", "curve", "strips"]

CLASSES = {".": "ok", "e": "eval", "w": "wait", "~": "slow", "v": "veto", "!": "find", "X": "fault"}
MAX_POINTS = 300
_ROW_PX = 14
_TOP_PX, _PLOT_PX, _WORDS_PX = 16, 184, 20  # a curve: room for the highest level's words, the plot, the words of its ends
_ACROSS = 1_000  # of a plot, in its own units: the page stretches it


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """What a curve shows at one x: the middle, and the range over the ranks."""

    x: float
    low: float
    middle: float
    high: float


Updates: TypeAlias = tuple[int, int] | None  # that the model had before the first and the last step, where those are other numbers


def strips(rows: Sequence[tuple[str, str]], first: int, last: int, *, label: str, updates: Updates = None) -> str:
    """`rows` are (name, cells), under what their colours mean. Runs of one mark become one stroke of one path per mark, so that 128 ranks stay small."""
    num_cells = max((len(cells) for _, cells in rows), default=1)
    paths: dict[str, list[str]] = {}
    for number, (_, cells) in enumerate(rows):
        for mark, start, length in _runs(cells):
            paths.setdefault(mark, []).append(f"M{start} {number * _ROW_PX + _ROW_PX // 2}h{length}")
    drawn = "".join(
        f'<path class="m-{CLASSES[mark]}" d="{"".join(paths[mark])}"><title>{MEANINGS[mark]}</title></path>'
        for mark in MEANINGS
        if mark in paths
    )
    legend = "".join(f'<span><i class="b-{CLASSES[mark]}"></i>{MEANINGS[mark]}</span>' for mark in MEANINGS if mark in paths)
    names = "".join(f"<span>{escape(name)}</span>" for name, _ in rows)
    height = len(rows) * _ROW_PX
    picture = f'<svg viewBox="0 0 {num_cells} {height}" preserveAspectRatio="none" height="{height}">{drawn}</svg>'
    ends = "".join(
        f'<div class="ends"><span>{left}</span><span>{right}</span></div>'
        for left, right in ((f"step {first}", last), *([(f"after {count(updates[0], 'update')}", updates[1])] if updates else ()))
    )
    shown = f'<div class="strips" role="img" aria-label="{escape(label)}"><div class="names">{names}</div><div>{picture}{ends}</div></div>'
    return f'<p class="legend">{legend}</p>{shown}'


def _runs(cells: str) -> list[tuple[str, int, int]]:
    """(mark, start, length) of what is no blank."""
    found: list[tuple[str, int, int]] = []
    for place, mark in enumerate(cells):
        if found and found[-1][0] == mark and found[-1][1] + found[-1][2] == place:
            found[-1] = (mark, found[-1][1], found[-1][2] + 1)
        else:
            found.append((mark, place, 1))
    return [run for run in found if run[0] in CLASSES]


def curve(
    points: Mapping[float, Sequence[float]],
    *,
    label: str,
    unit: str,
    marks: Sequence[float] = (),
    x_word: str = "step",
    updates: Updates = None,
    logarithmic: bool = False,
) -> str:
    """`points`: by x the values of the ranks. A line through the middle, a band from the lowest to the highest, `marks` as upright lines."""
    bands = _thinned([_band(x, values) for x, values in sorted(points.items()) if any(map(math.isfinite, values))])
    if not bands:
        return ""
    low, high = min(band.low for band in bands), max(band.high for band in bands)
    scale = _Scale(
        first=bands[0].x, last=max(bands[-1].x, *marks, bands[0].x + 1), low=low, high=high if high > low else low + (abs(low) or 1) * 0.1,
        logarithmic=logarithmic and low > 0,
    )  # fmt: skip
    area = [f"{scale.x(band.x):.1f},{scale.y(band.high):.1f}" for band in bands]
    area += [f"{scale.x(band.x):.1f},{scale.y(band.low):.1f}" for band in reversed(bands)]
    upright = "".join(f'<path class="mark" d="M{scale.x(mark):.1f} {_TOP_PX}v{_PLOT_PX}"/>' for mark in marks)
    words = f"{label}: from {_short(bands[0].middle)} to {_short(bands[-1].middle)} {unit}, lowest {_short(low)}, highest {_short(high)}"
    drawn = f'<polygon class="band" points="{" ".join(area)}"/>{_line(bands, scale)}{upright}'
    return _fluid(words, scale.grid() + drawn, scale.words(unit, x_word, updates))


def _fluid(label: str, plot: str, words: str) -> str:
    """As wide as its place on the page, a phone's too: the plot is stretched, its words are not."""
    height = _TOP_PX + _PLOT_PX
    stretched = (
        f'<svg viewBox="0 0 {_ACROSS} {height}" preserveAspectRatio="none" width="100%" height="{height}" overflow="visible">{plot}</svg>'
    )
    return f'<svg class="curve" role="img" aria-label="{escape(label)}" height="{height + _WORDS_PX}">{stretched}{words}</svg>'


def _line(bands: Sequence[Band], scale: _Scale) -> str:
    """A single point is a dot: a line of one point is nothing."""
    places = [f"{scale.x(band.x):.1f} {scale.y(band.middle):.1f}" for band in bands]
    return f'<path class="line dot" d="M{places[0]}h0"/>' if len(places) == 1 else f'<path class="line" d="M{"L".join(places)}"/>'


def _band(x: float, values: Sequence[float]) -> Band:
    known = [value for value in values if math.isfinite(value)]
    return Band(x=x, low=min(known), middle=median(known), high=max(known))


def _thinned(bands: Sequence[Band]) -> list[Band]:
    """At most MAX_POINTS, and no low or high lost."""
    size = math.ceil(len(bands) / MAX_POINTS) or 1
    groups = (bands[start : start + size] for start in range(0, len(bands), size))
    return [
        Band(x=group[0].x, low=min(one.low for one in group), middle=group[len(group) // 2].middle, high=max(one.high for one in group))
        for group in groups
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    first: float
    last: float
    low: float
    high: float
    logarithmic: bool

    @property
    def levels(self) -> tuple[float, float, float]:
        middle = math.sqrt(self.low * self.high) if self.logarithmic else (self.low + self.high) / 2
        return self.low, middle, self.high

    def x(self, value: float) -> float:
        return (value - self.first) / (self.last - self.first) * _ACROSS

    def y(self, value: float) -> float:
        low, here, high = (math.log(one) if self.logarithmic else one for one in (self.low, value, self.high))
        return _TOP_PX + (high - here) / (high - low) * _PLOT_PX

    def grid(self) -> str:
        return "".join(f'<path class="grid" d="M0 {self.y(level):.1f}H{_ACROSS}"/>' for level in self.levels)

    def words(self, unit: str, x_word: str, updates: Updates) -> str:
        """Each level's above its line."""
        levels = "".join(f'<text y="{self.y(level) - 3:.1f}">{_short(level)} {escape(unit)}</text>' for level in self.levels)
        bottom = _TOP_PX + _PLOT_PX + _WORDS_PX - 5
        left, right = f"{escape(x_word)} {_short(self.first)}", _short(self.last)
        if updates:
            left, right = f"{left}, after {count(updates[0], 'update')}", f"{right}, after {updates[1]}"
        return f'{levels}<text y="{bottom}">{left}</text><text x="100%" y="{bottom}" text-anchor="end">{right}</text>'


def _short(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"
