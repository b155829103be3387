"""Which pass over which loader a training follows."""

from __future__ import annotations

import pytest

from torch_watchdog_agent.checkpoint.position import LoaderPosition
from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.hooks import tracks
from torch_watchdog_agent.hooks.tracks import Stand, Track, follow, turned_from


@pytest.mark.parametrize(
    ("is_over", "is_used", "turned"),
    [(True, False, True), (True, True, False), (False, False, False)],  # the last: two loaders in turn, of which the second is followed
)
def test_only_a_pass_that_is_over_and_unused_was_no_training(is_over: bool, is_used: bool, turned: bool) -> None:
    looked_at = Stand(is_over=is_over, is_used=is_used)
    assert not turned_from(None)
    follow(looked_at)
    assert not turned_from(looked_at)
    follow(Stand())
    assert turned_from(looked_at) is turned


class Loader:
    """Of six batches."""


@pytest.fixture(autouse=True)
def nobody_trains_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracks, "followed", None)
    monkeypatch.setattr(tracks, "evaluates_first", False)


def goes_through(track: Track, batches: int, *, trains_on: int = 0) -> Stand:
    """One pass as the hooks tell of it: so many batches are taken by its end, and those behind `trains_on` are dropped."""
    begins_at = 0 if track.resume is None else track.resume.batches
    stand = Stand(track, epoch=track.epoch, is_resumed=track.resume is not None, batches=begins_at)
    for number in range(begins_at + 1, batches + 1):
        stand.batches = number
        follow(stand)
        if number <= trains_on:
            tracks.used()
    (tracks.ended if batches == 6 else tracks.left)(stand)
    return stand


def saved_behind(loader: Loader, *, taken: int, trained: int, at: int, evaluates: bool = True) -> LoaderPosition:
    goes_through(tracks.track_of(loader), taken, trains_on=trained)
    place = tracks.training_place()._replace(batches=at)  # of a window's start, which was noted before the end
    if evaluates:
        tracks.turns_to(Stand())
        tracks.turns_to_evaluation()
    return place.with_generators(RngState.capture())


def resumed_from(saved: LoaderPosition, loader: Loader, monkeypatch: pytest.MonkeyPatch) -> Track:
    monkeypatch.setattr(tracks, "followed", None)
    track = tracks.track_of(loader)
    track.resume, track.epoch = saved, saved.epoch
    return track


@pytest.mark.parametrize(
    ("taken", "trained", "at", "again"),
    [(5, 4, 4, 5), (4, 4, 4, 4), (4, 4, 4, None), (6, 5, 5, 6)],
    ids=["a break in front of the step", "a slice", "no pass for no batch", "an incomplete last batch"],
)
def test_a_pass_that_its_loop_was_done_with_is_done_with_in_the_run_that_goes_on(
    taken: int, trained: int, at: int, again: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches that nothing was trained on had come again in the next epoch, in the place of that one's own."""
    saved = saved_behind(Loader(), taken=taken, trained=trained, at=at)
    track = resumed_from(saved, loader := Loader(), monkeypatch)
    if again is not None:
        goes_through(track, again)
        assert (track.epoch, track.resume) == (1, None)
    tracks.turns_to_evaluation()
    assert (track.epoch, track.resume) == (1, None)
    del loader


@pytest.mark.parametrize(
    ("taken", "trained", "at", "evaluates", "looks_at"),
    [(3, 3, 3, False, 4), (5, 4, 3, True, 4), (5, 5, 2, True, 5), (6, 6, 6, True, None)],
    ids=["nobody knows that it was left", "a look that stops earlier", "a window before the last", "its very end"],
)
def test_any_other_place_is_left_alone_by_looks_and_evaluations(
    taken: int, trained: int, at: int, evaluates: bool, looks_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = saved_behind(Loader(), taken=taken, trained=trained, at=at, evaluates=evaluates)
    track = resumed_from(saved, loader := Loader(), monkeypatch)
    if looks_at is not None:
        goes_through(track, looks_at)
    tracks.turns_to_evaluation()
    assert (track.epoch, track.resume) == (0, saved)
    goes_through(track, 6, trains_on=6)
    assert (track.epoch, track.resume) == (1, None)
    del loader


@pytest.mark.parametrize(
    ("taken", "trained", "at", "was_left"),
    [(4, 4, 4, True), (5, 4, 4, False), (1, 1, 1, False), (4, 4, 3, False)],
    ids=["a break behind the step", "one in front of it, which comes again", "a pass for every batch", "a step is still to come"],
)
def test_behind_a_break_behind_the_last_step_there_is_nothing_to_train_on(
    taken: int, trained: int, at: int, was_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = saved_behind(Loader(), taken=taken, trained=trained, at=at)
    track = resumed_from(saved, loader := Loader(), monkeypatch)
    stand = tracks.begin(track, None, None, None)
    stand.is_resumed, stand.batches = True, at
    assert tracks.was_left_here(stand) is was_left
    follow(stand)
    assert not tracks.was_left_here(stand)
    del loader


def test_a_place_keeps_on_disk_where_its_loop_was_done_with_the_pass() -> None:
    saved = saved_behind(Loader(), taken=5, trained=4, at=4)
    assert saved.over_at == 5 and LoaderPosition.from_parts(*saved.to_parts()).over_at == 5


def test_a_training_that_goes_on_in_a_pass_from_before_the_resume_is_told_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`it = iter(loader)` in front of `restore(loader=loader)`: its batches had been others than those of the place, in silence."""
    told: list[bool] = []
    loader = Loader()
    track = tracks.track_of(loader)
    begun_before = Stand(track)
    track.resume, track.missed = saved_behind(Loader(), taken=3, trained=3, at=3), lambda: told.append(True)
    for _ in range(2):
        follow(begun_before)
        tracks.used()
    assert told == [True]
    track.resume = saved_behind(Loader(), taken=3, trained=3, at=3)
    monkeypatch.setattr(tracks, "followed", None)
    goes_through(track, 6, trains_on=6)
    assert told == [True]


@pytest.mark.parametrize("makes_a_new_one", [False, True])
def test_a_pass_whose_first_batch_the_training_asks_for_is_its_place(makes_a_new_one: bool) -> None:
    """Lightning's, which never hears that a pass has no more; it can make a new loader for each epoch."""
    loader, another = Loader(), Loader()
    first = Stand(track := tracks.track_of(loader))
    for first.batches in range(1, 7):
        follow(first)
        tracks.used()
    tracks.asks_first(first)
    assert tracks.training_place()[:2] == (0, 6)
    of = tracks.track_of(another) if makes_a_new_one else track
    tracks.asks_first(Stand(of, epoch=of.epoch))
    assert tracks.training_place()[:2] == (of.epoch, 0)


@pytest.mark.parametrize(
    ("told", "epoch"), [(2, 0), (3, 1), (9, 0), (None, 0)], ids=["the same epoch", "the next one", "it is told steps", "no sampler"]
)
def test_a_sampler_that_was_told_a_later_epoch_says_that_the_one_to_resume_is_over(
    told: int | None, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the data, or an evaluation before all training, tells nothing then."""
    loader = Loader()
    goes_through(tracks.track_of(loader), 4, trains_on=4)
    saved = tracks.training_place()._replace(sampler_epoch=2).with_generators(RngState.capture())
    track = resumed_from(saved, fresh := Loader(), monkeypatch)
    stand = tracks.begin(track, None, None, told)
    assert (track.epoch, track.resume, stand.epoch) == (epoch, None if epoch else saved, epoch)
    del fresh


def test_an_epoch_is_taken_to_end_where_the_one_before_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stop at the last fetch of an epoch nobody has seen yet that its loop is done with it."""
    track = tracks.track_of(loader := Loader())
    goes_through(track, 5, trains_on=4)
    second = tracks.begin(track, None, None, None)
    assert tracks.turns_to(second)
    follow(second)
    ends = [tracks.training_place()._replace(batches=batches).with_generators(RngState.capture()).over_at for batches in (3, 4)]
    assert ends == [None, 5]
    del loader


def test_a_short_first_epoch_says_nothing_of_a_place_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation in front of the resumed pass had taken that for over, and its batches came again."""
    track = tracks.track_of(loader := Loader())
    goes_through(track, 4, trains_on=4)
    second = tracks.begin(track, None, None, None)
    assert tracks.turns_to(second)
    follow(second)
    assert tracks.training_place()._replace(batches=4).with_generators(RngState.capture()).over_at is None
    del loader


def test_an_evaluation_before_all_training_is_not_taken_for_one_behind_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    tracks.turns_to_evaluation()
    saved = saved_behind(Loader(), taken=4, trained=4, at=4)
    track = resumed_from(saved, loader := Loader(), monkeypatch)
    tracks.turns_to_evaluation()
    assert (track.epoch, track.resume) == (0, saved)
    del loader
