"""Where every rank only waits: who is behind, who waits for whom in a circle, and who is in another collective."""

from __future__ import annotations

import pytest

from torch_watchdog.job.standstill import Place, Split, elsewhere, split
from torch_watchdog_proto.rescue_words import GroupCalls, Looked

BARRIER = ("barrier", 7)
GATHER = ("all_gather of (4, 7) int64", 8)
OF_CPP = ("", 0)


def at(rank: int, *, between: bool = False, newest: tuple[str, int] = OF_CPP, times: int = 0, **made: int) -> Place:
    calls = tuple(GroupCalls(group=group, made=count, newest=newest[0], alike=newest[1], times=times) for group, count in made.items())
    return Place(rank=rank, step=5, between=between, where=f"train.py:{rank}", calls=calls)


def found(*places: Place) -> Split:
    verdict = split(places)
    assert verdict is not None
    return verdict


def test_who_has_called_fewer_keeps_the_others_waiting() -> None:
    verdict = found(at(0, world=9), at(1, world=8, newest=BARRIER), at(2, world=9))
    assert verdict.ranks == (1,)
    assert "rank 1 has called 8 collectives, rank 0 9" in verdict.why
    assert "rank 1: barrier at train.py:1" in verdict.why


def test_who_waits_for_one_that_is_behind_elsewhere_is_not_to_blame_for_being_behind_itself() -> None:
    """2 keeps 1 waiting in `rows`, and so 1 keeps 0 waiting in `columns`."""
    assert found(at(0, columns=5), at(1, columns=4, rows=7), at(2, rows=6)).ranks == (2,)


def test_what_a_rank_has_caught_is_told_with_the_collective_that_it_went_into_then() -> None:
    """A barrier in a `finally`: the error would never be printed."""
    behind = Looked(
        rank=1,
        generation=1,
        waits=True,
        stack="",
        timeout_s=600.0,
        calls=at(1, world=8).calls,
        step=5,
        handles="ValueError: no row at d.py:7",
    )
    verdict = found(at(0, world=9), Place.of(behind))
    assert (
        "rank 1: a collective that Python did not call" in verdict.why
        and "in what its script does after ValueError: no row at d.py:7" in verdict.why
    )
    away = Looked(
        rank=1,
        generation=1,
        waits=False,
        stack='  File "/x/train.py", line 7, in main\n',
        timeout_s=600.0,
        handles="OSError: full at d.py:9",
    )
    assert elsewhere(away).endswith("line 7, in main, in what its script does after OSError: full at d.py:9")


def test_two_groups_in_different_order_are_a_circle() -> None:
    verdict = found(at(0, a=3, b=2), at(1, a=2, b=3))
    assert verdict.ranks == (0, 1)
    assert "different order" in verdict.why


def test_the_fewer_are_the_odd_ones() -> None:
    verdict = found(at(0, world=9, newest=BARRIER), at(1, world=9, newest=GATHER), at(2, world=9, newest=BARRIER))
    assert verdict.ranks == (1,)
    assert "different collectives: collective 9 of" in verdict.why


def test_of_two_the_one_that_is_done_with_its_loop_is_the_odd_one() -> None:
    assert found(at(0, world=9), at(1, world=9, newest=BARRIER, between=True)).ranks == (1,)


def test_of_two_in_their_steps_the_one_in_a_call_that_it_never_made_before_is_the_odd_one() -> None:
    assert found(at(0, world=9, newest=GATHER, times=8), at(1, world=9, newest=BARRIER)).ranks == (1,)
    assert found(at(0, world=9, newest=BARRIER, times=1), at(1, world=9, times=7)).ranks == (0,)


def test_of_two_whose_calls_are_usual_nothing_tells_which_is_wrong() -> None:
    assert found(at(0, world=9, newest=GATHER, times=4), at(1, world=9, newest=BARRIER, times=4)).ranks == (0, 1)


def test_of_two_and_two_the_strangers_to_the_loop_are_the_odd_ones() -> None:
    places = [at(rank, world=9, newest=BARRIER if rank % 2 else GATHER, times=0 if rank % 2 else 8) for rank in range(4)]
    assert found(*places).ranks == (1, 3)


@pytest.mark.parametrize(
    "places",
    [
        (at(0, world=9), at(1, world=9)),
        (at(0, world=9, newest=GATHER), at(1, world=9, newest=GATHER)),
        (at(0, left=9), at(1, right=4)),  # groups that they do not share
        (at(0), at(1)),
        (),
    ],
)
def test_nothing_is_said_of_ranks_that_are_in_the_same_collective(places: tuple[Place, ...]) -> None:
    assert split(places) is None


def test_shapes_that_may_differ_do_not_differ() -> None:
    """Each rank may bring its own to an all_to_all: the words differ, the kind does not."""
    assert split((at(0, world=9, newest=("all_to_all of (3,) int64", 4)), at(1, world=9, newest=("all_to_all of (5,) int64", 4)))) is None
