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


def test_behind_the_data_of_an_epoch_a_state_is_that_of_its_end_so_that_what_follows_is_not_done_twice(tmp_path: Path) -> None:
    heard = listen_to(tmp_path, "behind_the_data.py", policy="stop")
    within, behind = [False, 8.0, 8.0, 0, 2], [True, 8.0, 4.0, 0, 3]
    found, most_updates = heard.printed
    assert found[:5] == [within, *4 * [behind]]
    assert found[5:] == [[False, 4.0, 4.0, 1, 2], *4 * [[True, 4.0, 2.0, 1, 3]]]
    assert most_updates == 1  # the first step after an evaluation is one of its own
    assert heard.complaints == []
