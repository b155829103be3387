"""The place in the data that a rescue goes back to is the one that each window began at."""

from __future__ import annotations

from pathlib import Path

import pytest
from listening import listen_to

pytestmark = pytest.mark.e2e


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


def test_so_it_is_behind_a_pass_that_the_loop_leaves_early(tmp_path: Path) -> None:
    heard = listen_to(tmp_path, "behind_the_data.py", 2, policy="stop")
    within, behind = [False, 8.0, 8.0, 0, 2], [True, 8.0, 4.0, 0, 2]
    found, most_updates = heard.printed
    assert found[:6] == [within, *4 * [behind], [False, 4.0, 4.0, 1, 2]]
    assert most_updates == 1
    assert heard.complaints == []


WHOLE = [[epoch, batches, False] for epoch in (0, 1) for batches in (1, 2, 3)]


@pytest.mark.parametrize(
    ("loop", "places"),
    [
        pytest.param("looked_at_before", WHOLE, marks=pytest.mark.slow),
        ("one_batch_an_epoch", [[0, 1, False], [1, 1, False]]),
        ("evaluated_within", [place for place in WHOLE for _ in range(2)]),
        pytest.param("evaluated_without_a_word", [place for place in WHOLE for _ in range(2)], marks=pytest.mark.slow),
        ("after_one_that_is_kept", [*WHOLE[:2], *WHOLE[:3], WHOLE[2], *WHOLE[3:], WHOLE[5]]),
        ("resumed", [*WHOLE[:3], *WHOLE[4:], [2, 1, False], [2, 2, False], [2, 3, False]]),
        ("resumed_at_the_end_of_an_epoch", WHOLE[3:]),
        pytest.param("one_after_the_other", [*WHOLE[:3], *WHOLE[:3], *WHOLE[3:], *WHOLE[3:]], marks=pytest.mark.slow),
    ],
)
def test_an_epoch_is_a_pass_that_the_training_uses_and_no_other(loop: str, places: list[list[int]], tmp_path: Path) -> None:
    heard = listen_to(tmp_path, "epochs.py", loop, policy="stop")
    assert heard.printed == places and heard.complaints == []


@pytest.mark.parametrize(("loop", "first"), [("in_turn", 2), ("twice_at_once", 2), ("one_inside_the_other", 4)])
def test_a_loop_that_takes_batches_in_turn_has_no_single_place(loop: str, first: int, tmp_path: Path) -> None:
    """Which is known once it takes from the first one again."""
    heard = listen_to(tmp_path, "epochs.py", loop, policy="stop")
    assert [in_turn for _, _, in_turn in heard.printed] == [number >= first for number in range(len(heard.printed))]
