"""A job that was stopped ends with the stop's exit code, also where the daemon did not live to say so."""

from __future__ import annotations

from torch_watchdog_agent.node.lastwords import LastWords
from torch_watchdog_proto.messages import (
    BatchFact,
    Commit,
    Committed,
    Hold,
    Leave,
    Left,
    RankHello,
    Saved,
    Vetoed,
    Violation,
    WriteCommitted,
)
from torch_watchdog_proto.rescue_words import Failed

VIOLATION = Violation(kind="batch.index_out_of_range", summary="ids[1] = 70", cause="c", fix="f", batch=BatchFact(key="ids"))
HOLD = Hold(rank=1, step=4, micro_step=0, violation=VIOLATION)


def words(*messages: object) -> LastWords:
    last = LastWords()
    for message in messages:
        if isinstance(message, Commit | WriteCommitted | Leave):
            last.told(message)
        else:
            last.heard(message)  # type: ignore[arg-type]
    return last


def test_a_rank_that_left_on_an_order_ends_the_job_with_its_code() -> None:
    outcome = words(HOLD, Commit(generation=3, veto=4, exit_code=65), Left(rank=0, generation=3, updates_applied=4)).outcome(0, why="gone")
    assert outcome.exit_code == 65
    assert (outcome.lines, outcome.unjudged) == (("gone",), ("rank 1, step 4: ids[1] = 70",))


def test_what_ranks_said_of_their_failure_is_told_where_nobody_judges_it() -> None:
    last = words(Failed(rank=1, step=60, updates_applied=60, time_ns=1, text="ValueError: it fell", where="train.py:10"))
    last.ended(0, exit_code=None, signal=9)
    last.ended(1, exit_code=1, signal=None)
    last.ended(2, exit_code=0, signal=None)
    told = ("rank 1, step 60: ValueError: it fell at train.py:10", "rank 0 was ended by signal 9")
    assert last.outcome(1, why="gone").unjudged == told
    last.heard(HOLD)  # a bad batch explains them
    assert last.outcome(1, why="gone").unjudged == ("rank 1, step 4: ids[1] = 70",)
    last.heard(RankHello(rank=0, local_rank=0, world_size=2, attempt=1, pid=1, torch_version="2", host="h", version="1"))
    assert last.outcome(1, why="gone").unjudged == ()


def test_what_ranks_have_left_on_is_known_where_the_daemon_is_a_new_one() -> None:
    commit = Commit(generation=3, veto=4, exit_code=65)
    assert words(HOLD, commit, Left(rank=0, generation=3, updates_applied=4)).left_with() == 65
    assert words(HOLD, commit).left_with() is None


def test_what_ranks_have_sealed_before_they_left_is_known_where_no_daemon_says_so() -> None:
    commit, left = Commit(generation=3, veto=4, exit_code=65), Left(rank=0, generation=3, updates_applied=4)
    saved = Saved(rank=0, generation=3, updates_applied=4, path="/r/step-4", format="dcp")
    sealed = words(HOLD, commit, saved, Committed(rank=0, generation=3), left).outcome(0, why="gone").sealed
    assert sealed == {"path": "/r/step-4", "updates_applied": 4, "format": "dcp", "committed": True, "finite": True}
    assert words(HOLD, commit, saved, left).sealed() is None
    assert words(HOLD, commit, saved, Committed(rank=0, generation=3, error="full"), left).sealed() is None
    not_good = WriteCommitted(generation=3, manifest={}, good=False)
    assert words(HOLD, commit, saved, not_good, Committed(rank=0, generation=3), left).sealed() is None


def test_a_stop_on_request_of_which_nothing_good_is_known_here_is_no_good_end() -> None:
    stop, left = Commit(generation=3, stop_after=4, exit_code=143), Left(rank=0, generation=3, updates_applied=4)
    saved, sealed = Saved(rank=0, generation=3, updates_applied=4, path="/r/step-4", format="dcp"), Committed(rank=0, generation=3)
    assert words(stop, saved, left).left_with() == 1
    assert words(stop, saved, sealed, left).left_with() == 143
    assert words(stop, saved, Leave(generation=3, committed=True), left).left_with() == 143
    assert words(stop, saved, Leave(generation=3), left).left_with() == 1
    assert words(stop, saved, WriteCommitted(generation=3, good=False), sealed, left).left_with() == 1


def test_a_daemon_that_has_not_heard_all_is_believed_but_for_what_this_node_has_seen() -> None:
    stop, left = Commit(generation=3, stop_after=4, exit_code=0), Left(rank=0, generation=3, updates_applied=4)
    seen = words(stop, Leave(generation=3, committed=True), left)
    assert (seen.exit_code(1), seen.exit_code(None), seen.exit_code(65)) == (0, 0, 65)
    assert (words().exit_code(1), words().exit_code(None)) == (1, None)


def test_a_rank_that_failed_of_a_bad_batch_makes_it_bad_data() -> None:
    assert words(HOLD).outcome(1, why="gone").exit_code == 65


def test_a_command_that_ended_well_in_spite_of_a_hold_keeps_its_code() -> None:
    assert words(HOLD, Commit(generation=1, veto=4, leave=False)).outcome(0, why="gone").exit_code is None


def test_an_order_that_nobody_left_on_decides_nothing() -> None:
    assert words(Commit(generation=1, veto=4)).outcome(0, why="gone").exit_code is None


def test_a_batch_that_was_skipped_long_ago_is_not_why_a_command_fails() -> None:
    skipped = words(HOLD, Commit(generation=1, veto=4, leave=False), Vetoed(rank=0, generation=1, step=4))
    assert skipped.outcome(137, why="gone").exit_code is None
    assert skipped.outcome(137, why="gone").lines == ("gone",)


def test_what_an_earlier_attempt_was_told_decides_nothing_of_a_later_one() -> None:
    again = RankHello(
        rank=0, local_rank=0, world_size=2, pid=9, attempt=1, host="h", version="v", torch_version="t", backend="gloo", coupled=True
    )
    last = words(Commit(generation=1, leave=True, exit_code=65), again, Left(rank=0, generation=1, updates_applied=4))
    assert last.outcome(1, why="gone").exit_code is None
    checkpoint = words(Commit(generation=1, leave=False, exit_code=0), Left(rank=0, generation=1, updates_applied=4))
    assert checkpoint.outcome(1, why="gone").exit_code is None
