"""Drawings for pages, as SVG text: strips of ranks, and a curve with a band.

Pure, and sized by what is shown, never by the length of the run. Colours are classes: the page's style sheet knows dark from light. Words of the user's
data get in by `escape` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from torch_watchdog.report.strip import MEANINGS

__all__ = ["Band", "curve", "strips"]

CLASSES = {".": "ok", "e": "eval", "w": "wait", "~": "slow", "v": "veto", "!": "find", "X": "fault"}
WIDTH = 900
_LEFT = 110
_ROW = 14
_HEIGHT = 180
_BOTTOM = 22
MAX_POINTS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """What a curve shows at one x: the middle, and the range over the ranks."""

    x: float
    low: float
    middle: float
    high: float


def strips(rows: Sequence[tuple[str, str]], first: int, last: int, *, label: str) -> str:
    """`rows` are (name, cells). Runs of one mark become one stroke of one path per mark, so that 128 ranks stay small."""
    num_cells = max((len(cells) for _, cells in rows), default=1)
    cell = (WIDTH - _LEFT) / max(1, num_cells)
    paths: dict[str, list[str]] = {}
    names = []
    for number, (name, cells) in enumerate(rows):
        middle = number * _ROW + _ROW / 2
        names.append(f'<text x="{_LEFT - 6}" y="{middle + 4:g}" text-anchor="end">{escape(name)}</text>')
        for mark, start, length in _runs(cells):
            paths.setdefault(mark, []).append(f"M{_LEFT + start * cell:.1f} {middle:g}h{length * cell:.1f}")
    height = len(rows) * _ROW
    drawn = "".join(
        f'<path class="m-{CLASSES[mark]}" d="{"".join(paths[mark])}"><title>{MEANINGS[mark]}</title></path>'
        for mark in MEANINGS
        if mark in paths
    )
    axis = f'<text x="{_LEFT}" y="{height + 16}">step {first}</text><text x="{WIDTH}" y="{height + 16}" text-anchor="end">{last}</text>'
    return _svg("strips", height + _BOTTOM, label, "".join(names) + drawn + axis)


def _runs(cells: str) -> list[tuple[str, int, int]]:
    """(mark, start, length) of what is no blank."""
    found: list[tuple[str, int, int]] = []
    for place, mark in enumerate(cells):
        if found and found[-1][0] == mark and found[-1][1] + found[-1][2] == place:
            found[-1] = (mark, found[-1][1], found[-1][2] + 1)
        else:
            found.append((mark, place, 1))
    return [run for run in found if run[0] in CLASSES]


def _svg(kind: str, height: float, label: str, inside: str) -> str:
    return f'<svg class="{kind}" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def curve(points: Mapping[float, Sequence[float]], *, label: str, unit: str, marks: Sequence[float] = (), x_word: str = "step") -> str:
    """`points`: by x the values of the ranks. A line through the middle, a band from the lowest to the highest, `marks` as upright lines."""
    bands = _thinned([_band(x, values) for x, values in sorted(points.items()) if any(map(math.isfinite, values))])
    if not bands:
        return ""
    low, high = min(band.low for band in bands), max(band.high for band in bands)
    scale = _Scale(bands[0].x, max(bands[-1].x, *marks, bands[0].x + 1), low, high if high > low else low + (abs(low) or 1) * 0.1)
    line = " ".join(f"{scale.x(band.x):.1f},{scale.y(band.middle):.1f}" for band in bands)
    area = [f"{scale.x(band.x):.1f},{scale.y(band.high):.1f}" for band in bands]
    area += [f"{scale.x(band.x):.1f},{scale.y(band.low):.1f}" for band in reversed(bands)]
    upright = "".join(f'<path class="mark" d="M{scale.x(mark):.1f} 6v{_HEIGHT - 12}"/>' for mark in marks)
    words = f"{label}: from {_short(bands[0].middle)} to {_short(bands[-1].middle)} {unit}, lowest {_short(low)}, highest {_short(high)}"
    drawn = f'<polygon class="band" points="{" ".join(area)}"/><polyline class="line" points="{line}"/>{upright}'
    return _svg("curve", _HEIGHT + _BOTTOM, words, scale.axes(unit, x_word) + drawn)


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


@dataclass(frozen=True, slots=True)
class _Scale:
    first: float
    last: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.first) / (self.last - self.first) * (WIDTH - _LEFT)

    def y(self, value: float) -> float:
        return 6 + (self.high - value) / (self.high - self.low) * (_HEIGHT - 12)

    def axes(self, unit: str, x_word: str) -> str:
        levels = [self.low, (self.low + self.high) / 2, self.high]
        grid = "".join(f'<path class="grid" d="M{_LEFT} {self.y(level):.1f}H{WIDTH}"/>' for level in levels)
        words = "".join(
            f'<text x="{_LEFT - 6}" y="{self.y(level) + 4:.1f}" text-anchor="end">{_short(level)} {escape(unit)}</text>' for level in levels
        )
        ends = f'<text x="{_LEFT}" y="{_HEIGHT + 16}">{escape(x_word)} {_short(self.first)}</text>'
        return grid + words + ends + f'<text x="{WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{_short(self.last)}</text>'


def _short(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"
