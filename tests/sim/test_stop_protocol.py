"""The properties of the stop protocol, over many seeded schedules of both halves joined by a simulated network, and single schedules by name.

`make sim` runs 100,000; a failing one is printed with its seed, made as small as it gets: `python tests/sim/driver.py 1 SEED` runs it again.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from driver import first_failing, problem_of
from plan import Fault, Plan, draw, shrink
from world import World

from torch_watchdog_proto.stop.coordinator import Coordinator
from torch_watchdog_proto.stop.table import TABLE, Row

SCHEDULES = int(os.environ.get("TORCH_WATCHDOG_SCHEDULES", 3000))
FIRST_SEED = int(os.environ.get("TORCH_WATCHDOG_SEED", random.randrange(1 << 40)))
CALM: Any = {"delays": (0.0, 0.1), "repeat": 0.0}


@pytest.mark.timeout(900)
def test_all_properties_hold_over_random_schedules() -> None:
    print(f"{SCHEDULES} schedules from seed {FIRST_SEED}")
    failure = first_failing(FIRST_SEED, SCHEDULES)
    assert failure is None, failure


def test_every_row_of_the_transition_table_is_walked() -> None:
    walked: set[Row] = set()

    class Recording(Coordinator):
        def _take(self, row: Row, event: Any, now: float) -> Any:
            walked.add(row)
            return super()._take(row, event, now)

    rare = (
        Plan(1, 3, (Fault("checkpoint", 0.5), Fault("broken_save", 0)), loss=0.3),
        Plan(1, 3, (Fault("stop", 0.5), Fault("broken_save", 0)), loss=0.3),
        Plan(2, 3, (Fault("stop", 0.5), Fault("cut", 3.0), Fault("cut", 4.0, 1), Fault("cut", 5.0))),
    )
    for seed in range(6000):
        plan = rare[seed % 3] if seed < 900 else draw(seed)
        assert problem_of(plan, seed, coordinator=Recording) is None, seed
    assert set(TABLE.values()) - walked == set()


def test_a_seed_replays_exactly() -> None:
    runs = [World(draw(77), 77).run() for _ in range(2)]
    assert runs[0].closed == runs[1].closed
    assert [rank.applied for rank in runs[0].attempts[0].ranks] == [rank.applied for rank in runs[1].attempts[0].ranks]
    assert runs[0].now == runs[1].now


def test_a_failing_plan_is_shrunk_to_what_makes_it_fail() -> None:
    plan = Plan(4, 6, (Fault("bad", 2, 1), Fault("stop", 1.0), Fault("kill", 3.0, 3)), loss=0.1, evaluation_after=1)
    small = shrink(plan, lambda one: any(fault.kind == "bad" for fault in one.faults))
    assert small.faults == (Fault("bad", 2, 1),)
    assert (small.world, small.steps, small.loss, small.evaluation_after) == (2, 3, 0.0, None)


def job(*faults: Fault, world: int, steps: int, seed: int, **more: Any) -> World:
    return World(Plan(world, steps, faults, **{**CALM, **more}), seed).run()


def bad(rank: int, step: int) -> Fault:
    return Fault("bad", step, rank)


def test_a_bad_batch_stops_every_rank_before_the_same_step() -> None:
    world = job(bad(2, 3), world=4, steps=6, seed=1)
    assert [rank.end for rank in world.attempts[0].ranks] == ["left"] * 4
    assert {tuple(rank.applied) for rank in world.attempts[0].ranks} == {(0, 1, 2)}
    assert world.closed[-1].outcome == "done"
    assert world.closed[-1].checkpoint is not None
    assert world.closed[-1].checkpoint.committed
    assert world.closed[-1].exit_code == 65


def test_skip_leaves_out_one_step_on_every_rank_and_goes_on() -> None:
    world = job(bad(0, 2), world=3, steps=5, policy="skip", seed=2)
    assert {tuple(rank.applied) for rank in world.attempts[0].ranks} == {(0, 1, 3, 4)}
    assert {tuple(rank.vetoed) for rank in world.attempts[0].ranks} == {(2,)}
    assert [rank.end for rank in world.attempts[0].ranks] == ["finished"] * 3


def test_a_bad_batch_in_the_very_first_step_stops_before_it() -> None:
    world = job(bad(1, 0), world=2, steps=3, seed=3)
    assert [(rank.end, rank.applied) for rank in world.attempts[0].ranks] == [("left", []), ("left", [])]


def test_two_ranks_with_a_bad_batch_in_the_same_step_make_one_order() -> None:
    world = job(bad(0, 2), bad(2, 2), world=3, steps=4, seed=4)
    assert len([commit for commit in world.commits if commit.veto == 2]) == 1
    assert {tuple(rank.applied) for rank in world.attempts[0].ranks} == {(0, 1)}


def test_a_requested_stop_applies_the_same_updates_everywhere() -> None:
    world = job(Fault("stop", 1.5), world=3, steps=8, seed=5)
    assert len({tuple(rank.applied) for rank in world.attempts[0].ranks}) == 1
    assert [rank.end for rank in world.attempts[0].ranks] == ["left"] * 3


def test_a_requested_checkpoint_does_not_end_the_training() -> None:
    world = job(Fault("checkpoint", 1.5), world=2, steps=8, seed=6)
    assert [rank.end for rank in world.attempts[0].ranks] == ["finished"] * 2
    assert world.attempts[0].ranks[0].applied == list(range(8))
    assert world.closed[0].checkpoint is not None
    assert world.closed[0].checkpoint.committed


def test_a_broken_part_means_no_checkpoint_and_still_a_clean_stop() -> None:
    """None is told of: the ranks take away what they wrote of it."""
    world = job(bad(1, 3), Fault("broken_save", 0, 0), world=2, steps=5, seed=7)
    assert [rank.end for rank in world.attempts[0].ranks] == ["left"] * 2
    assert world.closed[-1].checkpoint is None
    assert "disk full" in world.closed[-1].reason


def test_bad_batches_twice_in_a_row_are_both_skipped() -> None:
    for seed in range(200):
        world = job(bad(0, 2), bad(1, 3), world=3, steps=6, policy="skip", seed=seed)
        assert {tuple(rank.applied) for rank in world.attempts[0].ranks} == {(0, 1, 4, 5)}, seed
        assert [rank.end for rank in world.attempts[0].ranks] == ["finished"] * 3, seed


def test_skipping_too_often_turns_into_a_stop() -> None:
    world = job(*(bad(0, step) for step in range(1, 20)), world=2, steps=20, policy="skip", seed=8)
    assert [rank.end for rank in world.attempts[0].ranks] == ["left"] * 2
    assert {tuple(rank.vetoed) for rank in world.attempts[0].ranks} == {tuple(range(1, 11))}
    assert "10 steps of the last 1000 were left out already (max_skips = 10)" in world.closed[-1].reason
    assert world.closed[-1].exit_code == 65


def test_a_daemon_that_dies_between_its_words_leaves_all_ranks_stopped_alike_or_none() -> None:
    for seed in range(400):
        world = job(Fault("stop", 2.0), Fault("daemon_dies", 1 + seed % 12), world=3, steps=40, seed=seed)
        ends = {(rank.end, tuple(rank.applied)) for rank in world.attempts[0].ranks}
        assert len(ends) == 1, (seed, ends)


def test_ranks_that_nothing_couples_do_not_leave_out_a_step_whose_veto_was_abandoned() -> None:
    """Found by seed 606917 of a million: one rank took a promise for a decision, and left with another set of updates than the others."""
    faults = (Fault("daemon_dies", 2, 3), bad(3, 0), Fault("stop", 3.6569237161962778), Fault("daemon_back", 4.498955502661401))
    plan = Plan(world=4, steps=3, faults=faults, policy="skip", delays=(0.0,), loss=0.0, repeat=0.0, coupled=False, evaluation_after=1)
    assert problem_of(plan, 0) is None


def test_a_stand_in_that_was_fetched_ahead_is_trained_on_in_no_step() -> None:
    """The loop is not known to be ahead: the step at hand is left out, and the one that uses the batch."""
    for seed in range(100):
        world = job(bad(1, 3), world=3, steps=6, policy="skip", ahead=True, seed=seed)
        assert {tuple(rank.applied) for rank in world.attempts[0].ranks} == {(0, 1, 4, 5)}, seed


def test_an_order_is_taken_back_until_it_is_decided() -> None:
    early = job(Fault("stop", 1.0), Fault("cancel", 1.05), world=2, steps=9, seed=1, delays=(0.1,))
    assert [(closed.outcome, closed.reason) for closed in early.closed] == [("given_up", "taken back by op")]
    assert [rank.end for rank in early.attempts[0].ranks] == ["finished"] * 2
    late = job(Fault("stop", 1.0), Fault("cancel", 1.3), world=2, steps=9, seed=1, delays=(0.1,))
    assert "cannot be taken back any more" in late.refused[0].reason
    assert [rank.end for rank in late.attempts[0].ranks] == ["left"] * 2


def test_an_order_that_a_rank_can_promise_nothing_for_is_given_up_at_once_with_its_reason() -> None:
    world = job(Fault("hooks_off", 0.5, 1), Fault("stop", 1.0), world=3, steps=6, seed=1)
    (closed,) = world.closed
    assert (closed.outcome, closed.reason) == ("given_up", "rank 1 can promise nothing: its hook is off") and closed.seconds <= 0.2
    assert {(rank.end, tuple(rank.applied)) for rank in world.attempts[0].ranks} == {("finished", tuple(range(6)))}


def test_a_bad_batch_is_not_waited_for_where_a_rank_can_promise_nothing() -> None:
    world = job(Fault("hooks_off", 0.0, 1), bad(2, 2), world=3, steps=6, seed=1)
    ranks = world.attempts[0].ranks
    assert [rank.end for rank in ranks] == ["broken", "broken", "raised"]
    assert {tuple(rank.applied) for rank in ranks} == {(0, 1)} and ranks[2].waited <= 0.4


def test_nobody_takes_back_the_order_of_a_bad_batch() -> None:
    world = job(bad(1, 2), *(Fault("cancel", 0.1 * tenth) for tenth in range(60)), world=2, steps=5, seed=1, delays=(0.1,))
    assert any("which nobody asked for" in refusal.reason for refusal in world.refused)
    assert [(rank.end, rank.applied) for rank in world.attempts[0].ranks] == [("left", [0, 1])] * 2


def test_a_daemon_that_comes_back_does_not_part_ranks_that_have_a_decision_from_those_that_wait_for_it() -> None:
    """Found by the simulation: a second stop made those forget the first, on which others had left."""
    for limit in range(1, 16):
        world = job(
            Fault("daemon_dies", limit),
            Fault("stop", 0.2),
            Fault("stop", 4.0),
            Fault("daemon_back", 3.0),
            world=4,
            steps=6,
            seed=9,
            delays=(0.0,),
        )
        assert len({tuple(rank.applied) for rank in world.attempts[0].ranks}) == 1, limit


def test_answers_of_an_attempt_that_was_replaced_change_nothing() -> None:
    world = job(Fault("stop", 1.0), Fault("restart", 1.2), Fault("stop", 2.5), world=2, steps=8, seed=3, delays=(0.5, 2.0), repeat=0.5)
    assert [rank.end for rank in world.attempts[0].ranks] == ["killed"] * 2
    assert [rank.end for rank in world.attempts[1].ranks] == ["left"] * 2


def test_a_stop_that_is_asked_for_in_an_evaluation_waits_for_its_end() -> None:
    world = job(Fault("stop", 3.0), world=2, steps=6, evaluation_after=1, seed=4)
    assert {rank.end for rank in world.attempts[0].ranks} == {"left"}
    assert {tuple(rank.applied) for rank in world.attempts[0].ranks} == {(0, 1, 2, 3)}


def test_an_order_at_the_end_of_the_loop_is_closed_with_a_reason() -> None:
    world = job(Fault("stop", 0.9), world=2, steps=1, seed=1, delays=(0.3,))
    assert [(closed.outcome, closed.reason) for closed in world.closed] == [
        ("given_up", "the training ended before it could be carried out")
    ]


def test_a_hold_is_said_again_to_the_next_daemon_and_the_stop_is_as_clean_as_ever() -> None:
    """It dies after each of its words in turn, and is back before the hold has run out: until the first Commit all ranks stop before the step."""
    for limit in range(1, 6):  # a Prepare for each of three ranks, then the Commits
        world = job(bad(1, 2), Fault("daemon_dies", limit), Fault("daemon_back", 4.0), world=3, steps=5, seed=3)
        ranks = world.attempts[0].ranks
        assert {tuple(rank.applied) for rank in ranks} == {(0, 1)}, limit
        assert [rank.end for rank in ranks] == ["left"] * 3, limit
