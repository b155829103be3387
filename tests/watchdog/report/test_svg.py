"""Drawings: what is seen of few points, of many, and of values that lie far apart."""

from __future__ import annotations

import math
import re

from torch_watchdog.report.svg import MAX_POINTS, curve, strips


def heights(drawn: str) -> list[float]:
    """Of the line's points, from the top."""
    (line,) = re.findall(r'class="line[^"]*" d="M([^"]+)"', drawn)
    return [float(point.split()[1].removesuffix("h0")) for point in line.split("L")]


def test_a_single_point_is_a_dot() -> None:
    drawn = curve({7.0: [2.0, 4.0]}, label="loss", unit="")
    assert re.search(r'class="line dot" d="M[\d.]+ [\d.]+h0"', drawn)


def test_two_points_are_a_line() -> None:
    assert 'class="line dot"' not in curve({0.0: [1.0], 1.0: [2.0]}, label="loss", unit="")


def test_a_first_step_that_takes_a_thousand_times_as_long_hides_no_other() -> None:
    points = {0.0: [1000.0], 1.0: [1.0], 2.0: [2.0]}
    one, two = heights(curve(points, label="step time", unit="ms", logarithmic=True))[1:]
    flat_one, flat_two = heights(curve(points, label="step time", unit="ms"))[1:]
    assert one - two > 15 and flat_one - flat_two < 1


def test_a_step_of_no_time_is_drawn_all_the_same() -> None:
    assert heights(curve({0.0: [0.0], 1.0: [5.0]}, label="step time", unit="ms", logarithmic=True))


def test_values_that_are_no_numbers_leave_a_gap() -> None:
    assert len(heights(curve({0.0: [1.0], 1.0: [math.nan], 2.0: [3.0]}, label="loss", unit=""))) == 2
    assert curve({0.0: [math.inf]}, label="loss", unit="") == ""


def test_a_long_run_is_drawn_with_its_highest_point() -> None:
    drawn = curve({float(step): [100.0 if step == 12_345 else 1.0] for step in range(20_000)}, label="loss", unit="")
    assert len(heights(drawn)) <= MAX_POINTS and ">100 <" in drawn


def test_the_words_of_a_drawing_are_not_stretched_with_it() -> None:
    for drawn in (curve({0.0: [1.0], 9.0: [2.0]}, label="loss", unit=""), strips([("rank 0", "..X")], 0, 2, label="steps")):
        stretched = re.findall(r"<svg viewBox.*?</svg>", drawn)
        assert len(stretched) == 1 and 'preserveAspectRatio="none"' in stretched[0] and "<text" not in stretched[0]
