"""The launch's exit code where several things came one after the other: what the job went on after decides nothing any more."""

from __future__ import annotations

from typing import Any

import pytest
from job_harness import Run, ended, exception, hold, steps

from torch_watchdog.job.events import OrderRequested, SendOrder
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.rescue_words import Failed, Free, Freed


def newest(run: Run, kind: type) -> Any:
    return [effect.tell.order for effect in run.effects if isinstance(effect, SendOrder) and isinstance(effect.tell.order, kind)][-1]


def trained(policy: m.Policy = "stop", run: Run | None = None, attempt: int = 0) -> Run:
    run = run or Run(policy)
    run.hello(0, 1, attempt=attempt)
    run.report(*(steps(rank, 0, [1.0] * 9, attempt=attempt) for rank in (0, 1)))
    return run


def promise(run: Run) -> None:
    for rank in (0, 1):
        run.say(m.Ack(rank=rank, generation=newest(run, m.Prepare).generation, passed=8))


def ask_for_a_stop(run: Run) -> None:
    run.handle(OrderRequested(kind="order.stop", by="somebody", reason=""))
    promise(run)


def lose_rank_1(run: Run, attempt: int = 0) -> None:
    """Rank 0 is freed, saves and leaves."""
    run.report(events=(ended(1, 99, signal=9, attempt=attempt),))
    generation = newest(run, Free).generation
    run.say(Freed(rank=0, generation=generation, updates_applied=9, holds="all"), attempt)
    run.say(m.Saved(rank=0, generation=generation, updates_applied=9, path="p/step-9", format="dcp"), attempt)
    run.say(m.Committed(rank=0, generation=generation), attempt)
    run.say(m.Left(rank=0, generation=generation, updates_applied=9), attempt)
    run.report(events=(ended(0, 100, exit_code=1, attempt=attempt),))
    run.wait(13)


def save_and_leave(run: Run, *, finite: bool = True, error: str | None = None) -> None:
    generation = newest(run, m.Commit).generation
    for rank in (0, 1):
        run.say(m.Saved(rank=rank, generation=generation, updates_applied=9, path="p/step-9", format="dcp", finite=finite, error=error))
    run.say(m.Committed(rank=0, generation=generation))
    for rank in (0, 1):
        run.say(m.Left(rank=rank, generation=generation, updates_applied=9))


@pytest.mark.parametrize(("number", "code"), [(None, 0), (10, 138), (15, 143)])
def test_a_stop_on_request_promises_a_good_checkpoint_by_its_code(number: int | None, code: int) -> None:
    """A full disk had ended it with 0, and with 143, of which a batch script thinks that all is saved."""
    ways: tuple[tuple[dict[str, Any], int], ...] = (
        ({}, code),
        ({"error": "the disk is full"}, m.EXIT_FAILED),
        ({"finite": False}, m.EXIT_FAILED),
    )
    for came_of_it, expected in ways:
        run = trained()
        if number is None:
            run.handle(OrderRequested(kind="order.stop", by="somebody", reason=""))
        else:
            run.say(m.Signalled(rank=1, signal=number))
        promise(run)
        save_and_leave(run, **came_of_it)
        assert run.end(0) == run.incidents[-1]["action"]["exit_code"] == expected


def test_a_stop_for_a_bad_batch_says_why_also_where_nothing_could_be_saved() -> None:
    run = trained()
    run.say(hold(1, 9))
    promise(run)
    save_and_leave(run, error="the disk is full")
    assert run.end(0) == m.EXIT_BAD_DATA


@pytest.mark.parametrize(("sealed", "code"), [(True, 0), (False, m.EXIT_FAILED)])
def test_ranks_that_leave_on_a_stop_that_was_given_up_have_saved_where_one_says_so(sealed: bool, code: int) -> None:
    run = trained()
    ask_for_a_stop(run)
    run.wait(400)  # the save took longer than the grace
    if sealed:
        run.say(m.Committed(rank=0, generation=newest(run, m.Commit).generation))
    for rank in (0, 1):
        run.say(m.Left(rank=rank, generation=newest(run, m.Commit).generation, updates_applied=9))
    assert run.end(0) == code


def test_a_rank_that_dies_before_a_requested_stop_makes_the_launch_fail() -> None:
    run = trained()
    ask_for_a_stop(run)
    lose_rank_1(run)
    assert run.end(1) is None
    assert run.incidents[-1]["kind"] == "rank.died"


def test_a_failure_that_the_launcher_takes_for_a_good_end_makes_the_launch_fail() -> None:
    """sys.exit(256), or a rank that ends early: 0 for a launcher, and so are ranks that have saved and left."""
    run = trained()
    lose_rank_1(run)
    assert run.end(0) == m.EXIT_FAILED


def test_a_later_attempt_that_ends_well_is_no_failure() -> None:
    run = trained()
    lose_rank_1(run)
    trained(run=run, attempt=1)
    run.report(events=tuple(ended(rank, 101 + rank, exit_code=0, attempt=1) for rank in (0, 1)))
    assert run.end(0) is None


def test_an_order_of_an_earlier_attempt_decides_nothing_of_a_later_one() -> None:
    run = trained()
    ask_for_a_stop(run)
    lose_rank_1(run)
    trained(run=run, attempt=1)
    lose_rank_1(run, attempt=1)
    assert run.end(1) is None


def test_a_batch_that_was_skipped_is_not_why_a_rank_fails_an_hour_later() -> None:
    run = trained("skip")
    run.say(hold(1, 9))
    promise(run)
    for rank in (0, 1):
        run.say(m.Vetoed(rank=rank, generation=1, step=9))
    run.report(*(steps(rank, 10, [1.0] * 9) for rank in (0, 1)))
    run.wait(3600)
    lose_rank_1(run)
    assert run.kinds == ["batch.index_out_of_range", "rank.died"]
    assert run.end(1) is None


@pytest.mark.parametrize("promised", [False, True])
def test_a_rank_that_is_killed_while_a_batch_is_being_skipped_has_not_died_of_it(promised: bool) -> None:
    """Found by an attack: 65 and the batch were told, and nothing of the kill."""
    run = trained("skip")
    run.say(hold(1, 9))
    run.report(events=(exception(1, 1, "step 9: held: ids[0, 0] = 51"),))  # the holder's last words
    if promised:
        promise(run)
    lose_rank_1(run)
    assert run.kinds == ["batch.index_out_of_range", "rank.died"]
    assert run.end(1) is None


def test_a_rank_that_raises_over_a_batch_which_was_to_be_skipped_fails_of_it() -> None:
    run = trained("skip")
    run.say(hold(1, 9))
    run.report(events=(exception(1, 1, "BadBatchError: rank 1 was not answered within 10 s"), ended(1, 99, exit_code=1)))
    run.report(events=(ended(0, 100, exit_code=1),))
    run.wait(13)
    assert run.kinds == ["batch.index_out_of_range"]
    assert run.end(1) == m.EXIT_BAD_DATA


def skip_on_both(run: Run, *, decided: bool) -> None:
    """Both ranks hold a batch of the same step: the second is heard before that step's order is decided, or after."""
    run.say(hold(1, 9))
    if decided:
        promise(run)
    run.say(hold(0, 9))
    if not decided:
        promise(run)
    for rank in (0, 1):
        run.say(m.Vetoed(rank=rank, generation=newest(run, m.Prepare).generation, step=9))


@pytest.mark.parametrize("decided", [False, True])
def test_bad_batches_of_two_ranks_in_one_step_are_over_with_its_skip(decided: bool) -> None:
    """Found by reading: the second one waited for an order of its own for ever, so that a rank that was killed an hour later had died of bad data."""
    run = trained("skip")
    skip_on_both(run, decided=decided)
    assert {incident["status"] for incident in run.incidents} == {"resolved"}
    run.report(*(steps(rank, 10, [1.0] * 9) for rank in (0, 1)))
    run.wait(3600)
    lose_rank_1(run)
    assert run.kinds == ["batch.index_out_of_range", "batch.index_out_of_range", "rank.died"]
    assert run.end(1) is None


def test_a_checkpoint_after_such_a_skip_is_an_order_of_its_own() -> None:
    """It had been taken for the order of the second bad batch, and whoever had asked for it waited for its record in vain."""
    run = trained("skip")
    skip_on_both(run, decided=True)
    run.handle(OrderRequested(kind="order.checkpoint", by="somebody", reason=""))
    assert run.kinds[-1] == "order.checkpoint"


def test_a_batch_that_an_earlier_daemon_was_told_of_is_over_with_the_skip_that_the_next_one_orders() -> None:
    before = trained("skip")
    before.say(hold(1, 9))
    run = trained(run=Run("skip", incidents=before.incidents))
    run.say(hold(1, 9))
    promise(run)
    for rank in (0, 1):
        run.say(m.Vetoed(rank=rank, generation=newest(run, m.Prepare).generation, step=9))
    assert [(incident["id"], incident["status"]) for incident in run.incidents] == [("1", "resolved")]


@pytest.mark.parametrize("promised", [(), (0,)])
def test_a_stop_that_gave_way_to_a_failure_is_told_once_as_the_ranks_hear_of_it(promised: tuple[int, ...]) -> None:
    run = trained()
    run.handle(OrderRequested(kind="order.stop", by="ann", reason=""))
    for rank in promised:
        run.say(m.Ack(rank=rank, generation=1, passed=8))
    lose_rank_1(run)
    assert run.job.outcome().lines == ()


def test_so_it_is_where_the_batch_is_found_once_the_failure_is_known() -> None:
    run = trained()
    run.say(Failed(rank=1, step=9, time_ns=1, updates_applied=9, text="ValueError: a mistake"))
    run.say(hold(0, 9))
    lose_rank_1(run)
    assert run.job.outcome().lines == ()


def test_one_that_gave_way_as_the_ranks_saved_is_told_at_the_end_for_no_word_to_the_ranks_has_said_so() -> None:
    run = trained()
    run.say(hold(0, 9))
    promise(run)
    for rank in (0, 1):
        run.say(m.Saving(rank=rank, generation=1, updates_applied=9))
    lose_rank_1(run)
    (line,) = run.job.outcome().lines
    assert line == "the stop for the bad batch gave way to a failure: rank 1 is gone; the state was saved all the same"


def test_what_one_rank_saves_alone_takes_the_place_of_a_common_save_that_another_did_not_live_to_finish() -> None:
    run = trained()
    run.say(hold(0, 9))
    promise(run)
    for rank in (0, 1):
        run.say(m.Saving(rank=rank, generation=1, updates_applied=9))
    run.say(m.Saved(rank=0, generation=1, updates_applied=9, path="p/step-9", error="Connection closed by peer"))
    lose_rank_1(run)
    assert run.kinds == ["batch.index_out_of_range", "rank.died"]
    for incident in run.incidents:
        assert incident["action"]["checkpoint"] == {
            "path": "p/step-9", "updates_applied": 9, "committed": True, "finite": True, "saved_by": [0], "format": "dcp",
        }  # fmt: skip
    assert run.end(1) == m.EXIT_BAD_DATA


@pytest.mark.parametrize(
    ("opened", "code"),
    [
        ([{"kind": "order.opened", "generation": 3, "order_kind": "batch"}], 65),
        ([{"kind": "order.opened", "generation": 3, "order_kind": "order.stop"}], 0),
        ([{"kind": "rank.signalled", "signal": 15}, {"kind": "order.opened", "generation": 3, "order_kind": "order.preemption"}], 143),
        ([{"kind": "order.opened", "generation": 2, "order_kind": "order.stop"}], m.EXIT_FAILED),
        ([{"kind": "order.opened", "generation": 3, "order_kind": "order.stop", "attempt": 1}], m.EXIT_FAILED),
    ],
)
def test_ranks_that_leave_on_an_order_of_a_daemon_that_is_no_more_end_the_launch_with_its_code(
    opened: list[dict[str, Any]], code: int
) -> None:
    """They save and leave by themselves where that daemon died after its Commit; one that is not known, as a rescue is none of them, is a failure's."""
    run = Run(events=[{"order": number, "attempt": 0, **event} for number, event in enumerate(opened, 1)])
    trained(run=run)
    run.say(m.Committed(rank=0, generation=3))
    for rank in (0, 1):
        run.say(m.Left(rank=rank, generation=3, updates_applied=9))
    run.report(events=tuple(ended(rank, 99 + rank, exit_code=0) for rank in (0, 1)))
    assert run.end(0) == code


def test_a_bad_batch_stays_the_reason_where_the_order_for_it_is_not_known_any_more() -> None:
    run = trained()
    run.say(hold(1, 9))
    for rank in (0, 1):
        run.say(m.Left(rank=rank, generation=99, updates_applied=9))
    assert run.end(0) == 65
