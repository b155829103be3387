"""A bad batch that a rank holds or refuses, and a stop or checkpoint on request: orders, incidents and the exit code."""

from __future__ import annotations

import pytest
from job_harness import BAD_TOKEN, Run, ended, hold, orders, steps, stop_at

from torch_watchdog.job.events import (
    OrderRequested,
    RankGone,
    Refused,
    SendOrder,
)
from torch_watchdog_proto import messages as m


def test_a_held_batch_asks_every_rank_and_commits_once_all_have_promised() -> None:
    run = Run()
    run.hello(0, 1)
    assert orders(run.say(hold(1, 5))) == [(0, m.Prepare), (1, m.Prepare)]
    assert orders(run.say(m.Ack(rank=0, generation=1, passed=4))) == []
    assert orders(run.say(m.Ack(rank=1, generation=1, passed=4))) == [(0, m.Commit), (1, m.Commit)]


def test_a_completed_stop_for_a_bad_batch_ends_with_65_and_an_incident_that_says_all() -> None:
    run = Run()
    run.hello(0, 1)
    stop_at(run, 5)
    assert run.end(0) == 65
    (incident,) = run.incidents
    assert incident["summary"] == "rank 1, step 5: input_ids[2,7] is 70, allowed 0..63 (embedding, transformer.wte), dataset sample 45"
    assert incident["origin"] == {"rank": 1, "local_rank": 1, "node": "node", "pid": 101}
    assert (incident["step"], incident["ranks_affected"]) == (5, [0])
    action = incident["action"]
    assert (action["prevented"], action["stopped_at_step"], action["ranks_stopped"], action["exit_code"]) == (True, 5, [0, 1], 65)
    assert (action["checkpoint"]["updates_applied"], action["checkpoint"]["committed"]) == (5, True)


def test_a_batch_that_is_held_and_then_refused_is_one_incident() -> None:
    run = Run()
    run.hello(0, 1)
    run.say(hold(1, 5))
    run.say(m.Refused(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    assert run.kinds == ["batch.index_out_of_range"]


def test_a_refused_batch_makes_a_failing_command_end_with_65_and_the_dying_ranks_its_victims() -> None:
    run = Run()
    run.hello(0, 1)
    run.say(m.Refused(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    run.report(events=(ended(1, 1, exit_code=1), ended(0, 2, exit_code=1)))
    assert run.end(1) == 65
    assert [(i["kind"], i["ranks_affected"], i["action"]["exit_code"]) for i in run.incidents] == [("batch.index_out_of_range", [0], 65)]


def test_a_command_that_ends_well_after_an_order_was_given_up_keeps_its_own_code() -> None:
    run = Run()
    run.hello(0, 1)
    run.say(hold(1, 5))
    run.wait(30)
    assert run.end(0) is None


def test_observe_gives_no_order_and_no_code() -> None:
    run = Run("observe")
    run.hello(0, 1)
    effects = run.say(m.Noticed(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    assert orders(effects) == []
    assert run.end(1) is None
    assert run.incidents[0]["action"]["policy"] == "observe" and not run.incidents[0]["action"]["prevented"]


def test_a_skipped_batch_is_resolved_and_names_no_code() -> None:
    run = Run("skip")
    run.hello(0, 1)
    run.say(hold(1, 5))
    for rank in (0, 1):
        run.say(m.Ack(rank=rank, generation=1, passed=4))
    for rank in (0, 1):
        run.say(m.Vetoed(rank=rank, generation=1, step=5))
    assert [(i["status"], i["action"]["exit_code"]) for i in run.incidents] == [("resolved", None)]
    assert run.end(0) is None


@pytest.mark.parametrize(
    ("aim", "policy", "kind"),
    [
        ("the skip of the bad batch", "skip", "batch"),
        ("the stop for the bad batch", "stop", "batch"),
        ("the checkpoint that was asked for", "stop", "order.checkpoint"),
        ("the stop that was asked for", "stop", "order.stop"),
    ],
)
def test_what_could_not_be_completed_is_told_by_what_it_was_for(aim: str, policy: str, kind: str) -> None:
    run = Run(policy)
    run.hello(0, 1)
    if kind == "batch":
        run.say(hold(1, 5))
    else:
        run.handle(OrderRequested(kind=kind, by="ann", reason=""))
    told = run.wait(400)  # no rank promises
    words = [effect.tell.order for effect in told if isinstance(effect, SendOrder)]
    assert [word.aim for word in words if isinstance(word, m.Abandon)] == [aim, aim]
    assert run.job.outcome().lines == ()  # a node has said it, by that word


def test_the_fingerprint_of_a_fault_is_the_same_on_another_rank_step_and_attempt() -> None:
    first, second = Run(), Run()
    first.hello(0, 1)
    first.say(m.Refused(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    second.hello(0, 1, attempt=2)
    second.say(m.Refused(rank=0, step=9, micro_step=0, violation=BAD_TOKEN), attempt=2)
    assert first.incidents[0]["fingerprint"] == second.incidents[0]["fingerprint"]


def test_a_message_of_an_older_attempt_changes_nothing() -> None:
    run = Run()
    run.hello(0, 1)
    run.hello(0, 1, attempt=1)
    assert run.say(hold(1, 5)) == ()
    assert run.handle(RankGone(attempt=0, rank=1, pid=101)) == ()
    assert run.report(events=(ended(1, 1, exit_code=1),)) == ()


def test_a_restart_of_the_ranks_forgets_their_steps_and_keeps_the_incidents() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(steps(0, 0, [1.0, 0.5]))
    run.say(m.Refused(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    run.hello(0, attempt=1)
    status = run.job.status()
    assert (status.attempt, status.incidents, [rank.last_step for rank in status.ranks]) == (1, 1, [None])


def test_a_requested_stop_is_told_to_every_rank_and_ends_with_0() -> None:
    run = Run()
    run.hello(0, 1)
    assert orders(run.handle(OrderRequested(kind="order.stop", by="ann", reason="maintenance"))) == [(0, m.Prepare), (1, m.Prepare)]
    for rank in (0, 1):
        run.say(m.Ack(rank=rank, generation=1, passed=7))
    for rank in (0, 1):
        run.say(m.Saved(rank=rank, generation=1, updates_applied=9))
    run.say(m.Committed(rank=0, generation=1))
    for rank in (0, 1):
        run.say(m.Left(rank=rank, generation=1, updates_applied=9))
    assert run.end(0) == 0
    assert [(i["kind"], i["severity"], i["status"], i["origin"]["rank"]) for i in run.incidents] == [
        ("order.stop", "info", "resolved", None)
    ]


def test_a_request_before_any_rank_has_come_is_refused_with_a_reason() -> None:
    run = Run()
    (refused,) = run.handle(OrderRequested(kind="order.stop", by="ann", reason=""))
    assert isinstance(refused, Refused) and "no rank" in refused.reason


def test_a_second_request_is_refused_with_the_first_as_its_reason() -> None:
    run = Run()
    run.hello(0, 1)
    run.handle(OrderRequested(kind="order.stop", by="ann", reason="maintenance"))
    effects = run.handle(OrderRequested(kind="order.checkpoint", by="bob", reason=""))
    assert ["maintenance" in effect.reason for effect in effects if isinstance(effect, Refused)] == [True]


def test_a_request_is_taken_back_while_a_rank_has_not_promised_and_the_job_goes_on() -> None:
    run = Run()
    run.hello(0, 1)
    run.handle(OrderRequested(kind="order.stop", by="ann", reason="maintenance"))
    run.say(m.Ack(rank=0, generation=1, passed=7))
    assert orders(run.handle(OrderRequested(kind="order.cancel", by="bob", reason=""))) == [(0, m.Abandon), (1, m.Abandon)]
    run.say(m.Ack(rank=1, generation=1, passed=7))
    assert (run.incidents[0]["status"], run.incidents[0]["summary"].rpartition("; ")[2]) == ("resolved", "given up: taken back by bob")
    (again,) = (effect for effect in run.handle(OrderRequested(kind="order.cancel", by="bob", reason="")) if isinstance(effect, Refused))
    assert again.reason == "no order is under way"
    assert run.end(0) is None


def test_an_order_that_waits_for_a_rank_shows_which_and_what_state_it_is_in() -> None:
    run = Run()
    run.hello(0, 1)

    def phases() -> list[str]:
        return [rank.phase for rank in run.job.status().ranks]

    def is_now(state: str) -> None:
        run.report(events=(m.RankEvent(rank=1, attempt=0, pid=101, kind="state", time_ns=1, order=1, text=state),))

    assert phases() == ["start", "start"]
    is_now("T")
    assert phases() == ["start", "stopped"]
    run.handle(OrderRequested(kind="order.stop", by="ann", reason=""))
    run.say(m.Ack(rank=0, generation=1, passed=3))
    assert phases() == ["train", "stopped"]
    is_now("S")
    assert phases() == ["train", "asked"]
    is_now("T")
    run.wait(10.1)
    assert "no word from rank 1 in time (preparing); stopped processes: rank 1 (`kill -CONT 101` on node)" in run.incidents[0]["summary"]
    is_now("S")
    assert phases() == ["train", "start"]


def leave_out(run: Run, number: int, step: int) -> None:
    """Rank 1 holds a bad batch, and every rank leaves its step out."""
    run.say(hold(1, step))
    for rank in (0, 1):
        run.say(m.Ack(rank=rank, generation=number, passed=step - 1))
    for rank in (0, 1):
        run.say(m.Vetoed(rank=rank, generation=number, step=step))


@pytest.mark.parametrize(("max_skips", "allowed"), [(None, 10), (2, 2), (1, 1)])
def test_the_batch_that_may_not_be_skipped_any_more_stops_the_job_and_says_why(max_skips: int | None, allowed: int) -> None:
    run = Run("skip", max_skips=max_skips)
    run.hello(0, 1)
    for number in range(allowed):
        leave_out(run, number + 1, 5 + number)
    assert run.job.outcome().lines == ()
    stop_at(run, 50, generation=allowed + 1)
    assert run.end(0) == 65
    steps = "1 step" if allowed == 1 else f"{allowed} steps"
    why = f"{steps} of the last 1000 were left out already (max_skips = {allowed}): this batch stops the job"
    assert run.job.outcome().lines == (why,)
    last = run.incidents[-1]
    assert last["action"]["exit_code"] == 65 and why in last["cause"]
    assert not any("max_skips" in incident["cause"] for incident in run.incidents[:-1])


def test_where_no_step_may_be_left_out_the_first_bad_batch_stops_the_job() -> None:
    run = Run("skip", max_skips=0)
    run.hello(0, 1)
    stop_at(run, 5)
    assert run.end(0) == 65
    assert run.job.outcome().lines == ("no step may be left out (max_skips = 0): this batch stops the job",)


def test_steps_that_were_left_out_long_ago_do_not_count() -> None:
    run = Run("skip", max_skips=1)
    run.hello(0, 1)
    leave_out(run, 1, 5)
    leave_out(run, 2, 1005)
    assert [incident["action"]["exit_code"] for incident in run.incidents] == [None, None]
