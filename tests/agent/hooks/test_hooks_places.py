"""The place in the data that a rescue goes back to is the one that each window began at."""

from __future__ import annotations

from pathlib import Path

from listening import listen_to


def test_each_window_knows_where_it_began_though_it_is_half_full_or_of_the_epoch_before(tmp_path: Path) -> None:
    heard = listen_to(tmp_path, "places.py", policy="stop")
    assert heard.steps == [4, 4, 2]
    half_full, next_epoch = heard.printed
    assert half_full == [[0, 8, 0], [0, 4, 0]]
    assert next_epoch == [[1, 0, 1], [0, 8, 0], [0, 4, 0], [0, 0, 0]]
    assert heard.complaints == []
