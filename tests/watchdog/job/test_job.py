"""The job: what its ranks and nodes say leads to orders, incidents and an exit code; moved by hand, without a clock."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from torch_watchdog.job.events import (
    AppendEvent,
    Effect,
    NodeJoined,
    NodeLeft,
    OrderRequested,
    RankGone,
    RankSpoke,
    Refused,
    ReportCame,
    SendOrder,
    Tick,
    WriteIncident,
)
from torch_watchdog.job.job import Job
from torch_watchdog.job.rescues import HEAD_START_S
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.rescue_words import Failed, Free, Release
from torch_watchdog_proto.stop.rescue import FREE_TIMEOUT_S

REPO = Path(__file__).resolve().parents[3]
SCHEMA = REPO / "proto" / "torch_watchdog_proto" / "incident.schema.json"
HELLO = m.NodeHello(job="job", node="node", version="0.1.0", policy="stop", command=("train",), run_dir="/runs/job", session="s")
BAD_TOKEN = m.Violation(
    kind="batch.index_out_of_range",
    summary="input_ids past the table",
    cause="the tokenizer has more words than the table has rows",
    fix="resize the table",
    batch=m.BatchFact(key="input_ids", element=(2, 7), value=70, count=1, shape=(4, 8), dtype="int64", sample=m.Sample(dataset_index=45)),
    bound=m.BoundFact(low=0, high=63, op="embedding", module="transformer.wte"),
)


class Run:
    """A job with a hand-moved clock, and what came out of it."""

    def __init__(self, policy: m.Policy = "stop", world_size: int = 2, **more: Any) -> None:
        self.now, self.world_size, self.effects = 1_800_000_000.0, world_size, list[Effect]()
        self.job = Job(replace(HELLO, policy=policy), started_s=self.now, **more)
        self.handle(NodeJoined(hello=HELLO))

    def handle(self, event: Any) -> tuple[Effect, ...]:
        effects = self.job.handle(event, now=self.now)
        self.effects += effects
        return effects

    def say(self, message: m.RankMessage, attempt: int = 0) -> tuple[Effect, ...]:
        return self.handle(RankSpoke(node="node", attempt=attempt, message=message))

    def hello(self, *ranks: int, attempt: int = 0) -> None:
        for rank in ranks:
            self.say(rank_hello(rank, self.world_size, attempt), attempt)

    def report(self, *blocks: m.StepBlock, events: tuple[m.RankEvent, ...] = ()) -> tuple[Effect, ...]:
        return self.handle(ReportCame(node="node", report=m.NodeReport(seq=1, time_ns=0, blocks=blocks, events=events)))

    def wait(self, seconds: float) -> tuple[Effect, ...]:
        self.now += seconds
        return self.handle(Tick())

    def end(self, exit_code: int) -> int | None:
        self.handle(NodeLeft(node="node", goodbye=m.NodeGoodbye(exit_code=exit_code)))
        return self.job.outcome().exit_code

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """As they stand on disk."""
        newest = {effect.incident["id"]: dict(effect.incident) for effect in self.effects if isinstance(effect, WriteIncident)}
        return list(newest.values())

    @property
    def kinds(self) -> list[str]:
        return [incident["kind"] for incident in self.incidents]


def rank_hello(rank: int, world_size: int, attempt: int = 0) -> m.RankHello:
    return m.RankHello(
        rank=rank, local_rank=rank, world_size=world_size, pid=pid_of(rank, attempt), attempt=attempt, host="node", version="0.1.0"
    )


def pid_of(rank: int, attempt: int = 0) -> int:
    return 100 + rank + 1000 * attempt


def hold(rank: int, step: int, violation: m.Violation = BAD_TOKEN) -> m.Hold:
    return m.Hold(rank=rank, step=step, micro_step=0, violation=violation)


def steps(rank: int, first: int, losses: Iterable[float], *, evaluation: bool = False, attempt: int = 0) -> m.StepBlock:
    losses = tuple(losses)
    numbers = tuple(range(first, first + len(losses)))
    every = (1,) * len(losses)
    return m.StepBlock(
        rank=rank, attempt=attempt, pid=pid_of(rank, attempt), first_record=1, micro_step=(0,) * len(losses), micro_of_step=numbers, micro_time_ns=every,
        loader_ns=every, loss=losses, loss_known=(True,) * len(losses), evaluation=(evaluation,) * len(losses), step=numbers,
        step_time_ns=every, step_ns=(2_000_000_000,) * len(losses),
    )  # fmt: skip


def ended(rank: int, order: int, exit_code: int | None = None, signal: int | None = None, attempt: int = 0) -> m.RankEvent:
    return m.RankEvent(
        rank=rank, attempt=attempt, pid=pid_of(rank, attempt), kind="exited", time_ns=0, order=order, exit_code=exit_code, signal=signal
    )


def exception(rank: int, order: int, text: str) -> m.RankEvent:
    return m.RankEvent(rank=rank, attempt=0, pid=pid_of(rank), kind="note", time_ns=0, order=order, text=text, level="error")


def orders(effects: Iterable[Effect]) -> list[tuple[int, type]]:
    return [(effect.tell.rank, type(effect.tell.order)) for effect in effects if isinstance(effect, SendOrder)]


def stop_at(run: Run, step: int) -> None:
    """A bad batch on rank 1, and every rank does what it is told."""
    run.say(hold(1, step))
    for rank in range(run.world_size):
        run.say(m.Ack(rank=rank, generation=1, passed=step - 1))
    for rank in range(run.world_size):
        run.say(m.Saved(rank=rank, generation=1, updates_applied=step, path="p", format="callback"))
    run.say(m.Committed(rank=0, generation=1))
    for rank in range(run.world_size):
        run.say(m.Left(rank=rank, generation=1, updates_applied=step))


# Bad batches


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


# Requests


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


# Losses


def test_the_first_rank_with_a_nan_loss_is_named_though_another_reported_first() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(steps(0, 0, [1.0, 1.0, math.nan]))
    assert run.kinds == []
    effects = run.report(steps(1, 0, [1.0, math.inf, math.nan]))
    (incident,) = run.incidents
    assert (incident["kind"], incident["origin"]["rank"], incident["step"], incident["ranks_affected"]) == ("loss.not_finite", 1, 1, [0])
    assert orders(effects) == [(0, m.Prepare), (1, m.Prepare)]


def test_a_loss_that_is_nan_on_every_rank_at_once_blames_none_of_them() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(steps(0, 0, [1.0, math.nan]), steps(1, 0, [1.0, math.nan]))
    (incident,) = run.incidents
    assert (incident["origin"]["rank"], incident["step"], incident["ranks_affected"]) == (None, 1, [0, 1])
    assert "before any other" not in incident["cause"]
    assert "every rank" in incident["cause"]
    run.say(overflow(1))
    assert run.incidents[0]["cause"] == "up overflows float16"


def test_losses_that_go_wrong_together_on_some_ranks_are_named_together() -> None:
    run = Run()
    run.hello(0, 1, 2)
    run.report(steps(2, 0, [math.nan]), steps(0, 0, [math.nan]), steps(1, 0, [1.0]))
    (incident,) = run.incidents
    assert (incident["origin"]["rank"], incident["ranks_affected"]) == (0, [1, 2])
    assert "ranks 0 and 2 were not finite at step 0, the others' were" in incident["cause"]


def test_the_only_rank_of_a_job_is_named_for_its_loss() -> None:
    run = Run()
    run.hello(0)
    run.report(steps(0, 0, [math.nan]))
    assert [incident["origin"]["rank"] for incident in run.incidents] == [0]


def test_a_diverged_training_stops_with_70_and_saves_nothing() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(steps(0, 0, [math.nan]), steps(1, 0, [1.0]))
    effects = [run.say(m.Ack(rank=rank, generation=1, passed=0)) for rank in (0, 1)][-1]
    (commit, _) = [effect.tell.order for effect in effects if isinstance(effect, SendOrder)]
    assert isinstance(commit, m.Commit) and (commit.save, commit.leave, commit.exit_code) == (False, True, 70)
    for rank in (0, 1):
        run.say(m.Left(rank=rank, generation=1, updates_applied=2))
    assert run.end(0) == 70
    assert run.incidents[0]["action"]["exit_code"] == 70


def test_a_silent_rank_delays_the_verdict_by_two_seconds_only() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(steps(0, 0, [math.nan]))
    run.wait(1.9)
    assert run.kinds == []
    run.wait(0.2)
    assert run.kinds == ["loss.not_finite"]


def test_a_nan_in_an_evaluation_and_under_observe_stops_nothing() -> None:
    evaluating, observing = Run(), Run("observe")
    for run in (evaluating, observing):
        run.hello(0, 1)
    evaluating.report(steps(0, 0, [math.nan], evaluation=True), steps(1, 0, [1.0], evaluation=True))
    observing.report(steps(0, 0, [math.nan]), steps(1, 0, [1.0]))
    assert evaluating.kinds == []
    assert observing.kinds == ["loss.not_finite"] and orders(observing.effects) == []


def test_the_order_of_a_rule_is_asked_for_again_while_another_is_under_way() -> None:
    run = Run()
    run.hello(0, 1)
    run.handle(OrderRequested(kind="order.checkpoint", by="ann", reason="now"))
    assert orders(run.report(steps(0, 0, [math.nan]), steps(1, 0, [1.0]))) == []
    assert (0, m.Prepare) not in orders(run.wait(9))
    assert (0, m.Prepare) in orders(run.wait(2))  # the first order has had its time


def test_a_diverged_training_is_one_incident_however_long_it_runs() -> None:
    run = Run("observe")
    run.hello(0, 1)
    for step in range(10):
        run.report(steps(0, step, [math.nan]), steps(1, step, [math.nan]))
    assert run.kinds == ["loss.not_finite"]


def test_the_others_are_told_once_which_rank_has_ended_and_how() -> None:
    run = Run()
    run.hello(0, 1)
    effects = run.report(events=(ended(1, 1, signal=9),))
    (free,) = [effect.tell.order for effect in effects if isinstance(effect, SendOrder) and isinstance(effect.tell.order, Free)]
    assert free.reason == "rank 1 was ended by signal 9"


@pytest.mark.parametrize(("culprit", "named", "others"), [(1, 1, [0]), (None, 0, [1]), (7, 0, [1])])
def test_the_incident_is_of_the_rank_whose_doing_it_is_not_of_the_one_that_found_it(
    culprit: int | None, named: int, others: list[int]
) -> None:
    """But for a number that is no rank's."""
    run = Run()
    run.hello(0, 1)
    found = replace(BAD_TOKEN, kind="rank.desync", summary="different collectives", batch=m.BatchFact(key=""), bound=None, culprit=culprit)
    run.say(m.Noticed(rank=0, step=5, micro_step=0, violation=found))
    (incident,) = run.incidents
    assert (incident["origin"]["rank"], incident["ranks_affected"]) == (named, others)
    assert incident["summary"] == f"rank {named}, step 5: different collectives"


def overflow(rank: int) -> m.Noticed:
    violation = m.Violation(
        kind="activation.not_finite", summary="the output of up is not finite", cause="up overflows float16", fix="use bf16",
        batch=m.BatchFact(key="(made by the model)", value="inf", sample=m.Sample(position_in_batch=1, dataset_index=23)),
        bound=m.BoundFact(op="Linear", module="up"), repairable=False,
    )  # fmt: skip
    return m.Noticed(rank=rank, step=0, micro_step=0, violation=violation)


@pytest.mark.parametrize("late", [False, True])
def test_the_module_in_which_a_loss_went_wrong_is_the_cause_of_that_one_incident(late: bool) -> None:
    run = Run()
    run.hello(0, 1)
    told = [lambda: run.say(overflow(0)), lambda: run.report(steps(0, 0, [math.nan]), steps(1, 0, [1.0]))]
    for tell in reversed(told) if late else told:
        tell()
    (incident,) = run.incidents
    assert (incident["kind"], incident["cause"]) == ("loss.not_finite", "up overflows float16")
    assert (
        incident["fix"]
        == "use bf16; this run has made no checkpoint that is known to be finite: resume from one of your own, from before step 0"
    )
    assert (incident["bound"]["module"], incident["batch"]["sample"]["dataset_index"]) == ("up", 23)
    assert incident["summary"].startswith("rank 0, step 0: the loss is nan")


def test_what_another_rank_found_in_its_model_is_not_the_first_ranks_cause() -> None:
    run = Run()
    run.hello(0, 1)
    run.say(overflow(1))
    run.report(steps(0, 0, [math.nan]), steps(1, 0, [1.0, math.nan]))
    assert run.incidents[0]["bound"] is None


# Failures


def test_the_first_rank_to_fail_is_the_origin_and_the_others_are_affected() -> None:
    run = Run(world_size=3)
    run.hello(0, 1, 2)
    run.report(steps(2, 0, [1.0, 1.0]))
    run.report(events=(ended(2, 7, exit_code=3), ended(0, 8, exit_code=1), ended(1, 9, signal=15)))
    (incident,) = run.incidents
    assert (incident["kind"], incident["origin"]["rank"], incident["step"], incident["ranks_affected"]) == ("rank.exception", 2, 2, [0, 1])


def test_a_rank_that_blames_its_peer_is_not_the_first_however_early_it_ended() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(events=(exception(0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:4242"), ended(0, 2, exit_code=1)))
    assert run.kinds == []
    run.report(events=(exception(1, 3, "ValueError: no image"), ended(1, 4, exit_code=1)))
    (incident,) = run.incidents
    assert (incident["origin"]["rank"], incident["summary"]) == (1, "rank 1: ValueError: no image")


def test_the_exception_is_known_though_it_was_read_after_the_end() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.report(events=(ended(0, 1, exit_code=1), exception(0, 2, "KeyError: 'x'")))
    assert run.incidents[0]["evidence"]["exception"] == {"text": "KeyError: 'x'"}


def test_a_killed_rank_is_named_with_its_signal_after_three_seconds_though_its_peers_hang() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(events=(ended(1, 1, signal=9),))
    run.wait(2.9)
    assert run.kinds == []
    run.wait(0.2)
    (incident,) = run.incidents
    assert incident["kind"] == "rank.died" and "SIGKILL" in incident["summary"] and incident["origin"]["rank"] == 1


def released(run: Run) -> list[int]:
    return [effect.tell.rank for effect in run.effects if isinstance(effect, SendOrder) and isinstance(effect.tell.order, Release)]


def test_the_launcher_is_told_in_time_though_the_healthy_rank_never_says_a_word() -> None:
    """Nothing in a rank is needed for it: its thread may be blocked for ever."""
    run = Run()
    run.hello(0, 1)
    run.report(events=(ended(1, 1, signal=9),))
    run.wait(FREE_TIMEOUT_S - 0.1)
    assert released(run) == []
    run.wait(0.2)
    assert released(run) == [1]
    run.wait(HEAD_START_S)
    assert released(run) == [1, 0]
    assert "no word from ranks 0" in run.incidents[0]["cause"]


def test_the_others_wait_for_the_end_of_the_rank_that_failed_first() -> None:
    """It may be tearing down for seconds: a launcher names the rank whose process it sees end first."""
    run = Run()
    run.hello(0, 1)
    run.say(Failed(rank=1, step=5, updates_applied=5, time_ns=1, text="ValueError: x", chain=("ValueError: x",), where="", between=False))
    run.wait(FREE_TIMEOUT_S + 0.1)
    assert released(run) == [1]
    run.wait(HEAD_START_S + 1)
    assert released(run) == [1]
    run.report(events=(ended(1, 1, exit_code=1),))
    run.wait(HEAD_START_S + 0.1)
    assert released(run) == [1, 0]


def test_what_became_of_the_others_is_said_once_and_after_a_sentence_as_one() -> None:
    run = Run()
    run.hello(0, 1)
    refused = m.Refused(rank=1, step=0, micro_step=0, violation=replace(BAD_TOKEN, cause="The table has 40 rows."))
    run.say(refused)
    run.report(events=(exception(1, 1, "BadBatchError: ids[0] = 51"), ended(1, 1, exit_code=1)))
    run.wait(FREE_TIMEOUT_S + HEAD_START_S)
    run.report(events=(exception(0, 2, "RuntimeError: Connection closed by peer"), ended(0, 2, exit_code=1)))
    run.wait(5)
    assert re.fullmatch(r"The table has 40 rows\. Nothing was saved: [^.]*\.", run.incidents[0]["cause"])


def test_ranks_that_were_asked_to_end_are_a_warning() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(events=(ended(0, 1, signal=15), ended(1, 2, signal=15)))
    assert [incident["severity"] for incident in run.incidents] == ["warning"]


def test_ranks_that_leave_by_order_or_end_well_have_not_failed() -> None:
    run = Run()
    run.hello(0, 1)
    stop_at(run, 5)
    run.report(events=(ended(0, 1, signal=6), ended(1, 2, exit_code=0)))
    run.wait(5)
    assert run.kinds == ["batch.index_out_of_range"]


def test_a_failing_command_names_the_rank_whose_end_nobody_saw() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.report(events=(ended(0, 1),))
    assert run.kinds == []
    run.end(3)
    assert [(i["kind"], "exit code 3" in i["cause"]) for i in run.incidents] == [("rank.exception", True)]


# What others read


def test_the_status_shows_each_ranks_newest_step_loss_and_time() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(steps(0, 0, [1.0, 0.5]), steps(1, 0, [2.0]))
    run.say(m.Finished(rank=1, passed=0))
    ranks = run.job.status().ranks
    assert [(r.last_step, r.loss, r.step_time_s, r.phase) for r in ranks] == [(1, 0.5, 2.0, "train"), (0, 2.0, 2.0, "end")]


def resumed_steps(rank: int, first: int, losses: Iterable[float], *, began: int) -> m.StepBlock:
    block = steps(rank, first, losses)
    return replace(block, updates_applied=tuple(began + step + 1 for step in block.step))


def test_the_status_of_a_resumed_rank_counts_updates_on() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(resumed_steps(0, 0, [1.0, 0.5], began=23), steps(1, 0, [2.0]))
    run.report(resumed_steps(0, 2, [0.4], began=23))
    assert [(r.last_step, r.updates_applied, r.began_at_update) for r in run.job.status().ranks] == [(2, 26, 23), (0, None, None)]


def test_an_incident_of_a_resumed_launch_names_the_updates_before_its_step() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(resumed_steps(0, 0, [1.0] * 5, began=23), resumed_steps(1, 0, [1.0] * 5, began=23))
    stop_at(run, 5)
    assert [(found["step"], found["framework_step"]) for found in run.incidents] == [(5, 28)]
    jsonschema.validate(run.incidents[0], json.loads(SCHEMA.read_text()))


def test_an_incident_that_is_found_before_the_first_report_names_them_at_the_end() -> None:
    run = Run()
    run.hello(0, 1)
    stop_at(run, 2)
    assert run.incidents[0]["framework_step"] is None
    run.report(resumed_steps(1, 0, [1.0] * 2, began=23))
    run.end(65)
    assert run.incidents[0]["framework_step"] == 25


def test_a_launch_that_resumed_nothing_names_steps_alone() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(resumed_steps(1, 0, [1.0] * 5, began=0))
    stop_at(run, 5)
    assert run.incidents[0]["framework_step"] is None


def test_a_loss_that_is_no_number_in_a_resumed_launch_names_the_checkpoint_of_its_own_run_that_is_older() -> None:
    """Its step counts from 0, the checkpoint's updates do not."""
    run = Run(policy="stop")
    run.hello(0, 1)
    run.handle(OrderRequested(kind="order.checkpoint", by="somebody", reason=""))
    for rank in (0, 1):
        run.say(m.Ack(rank=rank, generation=1, passed=1))
    for rank in (0, 1):
        run.say(m.Saved(rank=rank, generation=1, updates_applied=25, path="runs/job/checkpoints/step-25", format="callback"))
    run.say(m.Committed(rank=0, generation=1))
    run.report(resumed_steps(0, 0, [1.0] * 4, began=23), resumed_steps(1, 0, [1.0] * 4, began=23))
    run.report(resumed_steps(0, 4, [math.nan], began=23), resumed_steps(1, 4, [1.0], began=23))
    run.wait(5)
    found = next(one for one in run.incidents if one["kind"] == "loss.not_finite")
    assert found["framework_step"] == 27 and "resume from runs/job/checkpoints/step-25" in found["fix"]


def test_the_status_of_an_ended_job_shows_the_commands_own_exit_code_where_the_watchdog_decided_none() -> None:
    run = Run()
    run.hello(0, 1)
    assert run.job.status().exit_code is None
    run.end(3)
    assert (run.job.status().exit_code, run.job.outcome().exit_code) == (3, None)


def test_lost_records_are_counted_and_told_at_the_end() -> None:
    run = Run()
    run.report(replace(steps(0, 0, [1.0]), lost_records=12))
    run.end(0)
    assert run.job.outcome().lines == ("12 step records were overwritten before they could be read",)


def test_reports_that_a_node_dropped_are_told_once_each_time_there_are_more() -> None:
    run = Run()
    for dropped in (0, 3, 3, 5):
        run.handle(ReportCame(node="node", report=m.NodeReport(seq=1, time_ns=0, dropped_reports=dropped)))
    told = [effect.event["text"] for effect in run.effects if isinstance(effect, AppendEvent) and effect.event["kind"] == "node.dropped"]
    assert [text.split()[0] for text in told] == ["3", "2"]
    assert run.job.outcome().lines == ("5 reports of node did not fit while the daemon was away",)


def test_events_are_numbered_from_where_an_earlier_daemon_stopped() -> None:
    run = Run(events=[{"order": 40, "kind": "rank.gone"}])
    run.hello(0, 1)
    numbers = [effect.event["order"] for effect in run.effects if isinstance(effect, AppendEvent)]
    assert numbers == [41, 42, 43]


def test_orders_are_numbered_past_whatever_an_earlier_daemon_can_have_given_in_the_same_attempt() -> None:
    events = [
        {"order": 1, "attempt": 0, "kind": "order.opened", "generation": 3},
        {"order": 2, "attempt": 1, "kind": "order.opened", "generation": 1},
    ]
    generations = []
    for attempt in (0, 1, 2):
        run = Run(events=events)
        run.hello(0, 1, attempt=attempt)
        run.handle(OrderRequested(kind="order.stop", by="ann", reason=""))
        generations.append({effect.tell.order.generation for effect in run.effects if isinstance(effect, SendOrder)})
    assert generations == [{104}, {102}, {101}]


def test_incidents_of_an_earlier_daemon_are_neither_found_again_nor_renumbered() -> None:
    first = Run()
    first.hello(0, 1)
    first.say(m.Refused(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    second = Run(incidents=first.incidents)
    second.hello(0, 1)
    second.say(m.Refused(rank=1, step=5, micro_step=0, violation=BAD_TOKEN))
    assert second.incidents == []
    second.say(m.Refused(rank=1, step=6, micro_step=0, violation=BAD_TOKEN))
    assert [incident["id"] for incident in second.incidents] == ["2"]


@pytest.mark.parametrize("word", ["nan", "inf"])
def test_every_incident_keeps_the_schema(word: str) -> None:
    run = Run(world_size=2)
    run.hello(0, 1)
    run.say(
        m.Noticed(rank=0, step=1, micro_step=0, violation=replace(BAD_TOKEN, severity="warning", batch=m.BatchFact(key="x"), bound=None))
    )
    odd = m.BatchFact(key="y", element=(0,), value=word, derived=m.Derived(expression="y / 0", value=word), sample=m.Sample())
    run.say(
        m.Noticed(
            rank=0, step=1, micro_step=0, violation=replace(BAD_TOKEN, batch=odd, bound=m.BoundFact(low=word, high=1.5, ignored=(-100,)))
        )
    )
    run.handle(OrderRequested(kind="order.checkpoint", by="ann", reason="now"))
    run.wait(20)
    run.report(steps(0, 0, [math.nan]), steps(1, 0, [1.0]))
    run.wait(20)
    stop_at(run, 5)
    run.hello(0, 1, attempt=1)
    run.report(events=(ended(0, 1, exit_code=1, attempt=1), ended(1, 2, signal=9, attempt=1)))
    run.end(1)
    schema = json.loads(SCHEMA.read_text())
    assert {"batch.index_out_of_range", "order.checkpoint", "loss.not_finite", "rank.exception"} <= set(run.kinds)
    for incident in run.incidents:
        jsonschema.validate(incident, schema, format_checker=jsonschema.FormatChecker())
        json.dumps(incident, allow_nan=False)


def test_a_rank_that_trains_on_after_a_checkpoint_is_not_said_to_save() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.handle(OrderRequested(kind="order.checkpoint", by="ann", reason="now"))
    run.say(m.Saving(rank=0, generation=1, updates_applied=0))
    assert run.job.status().ranks[0].phase == "saving"
    run.report(steps(0, 0, [1.0]))
    assert run.job.status().ranks[0].phase == "train"


def test_an_order_is_no_incident_to_be_counted_and_nothing_fires_once_the_job_has_ended() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.handle(OrderRequested(kind="order.checkpoint", by="ann", reason="now"))
    assert run.job.status().incidents == 0
    run.end(0)
    assert [incident["status"] for incident in run.incidents] == ["resolved"]


def test_an_order_that_is_given_up_says_why_and_is_over() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.handle(OrderRequested(kind="order.checkpoint", by="ann", reason="now"))
    run.wait(400)
    (incident,) = run.incidents
    assert incident["status"] == "resolved" and "given up: no word from rank" in incident["summary"]


def test_an_order_that_was_met_without_a_checkpoint_says_why() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.handle(OrderRequested(kind="order.checkpoint", by="ann", reason="now"))
    run.say(m.Ack(rank=0, generation=1, passed=2))
    run.say(m.Saved(rank=0, generation=1, updates_applied=3, error="OSError: No space left on device"))
    run.say(m.Left(rank=0, generation=1, updates_applied=3))
    (incident,) = run.incidents
    assert incident["status"] == "resolved"
    assert incident["summary"].endswith("now; no checkpoint: rank 0: OSError: No space left on device")


def test_why_no_checkpoint_was_made_is_told_at_the_end() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.say(hold(0, 3))
    run.say(m.Ack(rank=0, generation=1, passed=2))
    run.say(m.Saved(rank=0, generation=1, updates_applied=3, error="OSError: No space left on device"))
    run.say(m.Left(rank=0, generation=1, updates_applied=3))
    assert "no checkpoint was made: rank 0: OSError: No space left on device" in run.job.outcome().lines


def test_an_order_that_is_given_up_after_ranks_have_left_on_it_still_names_the_code() -> None:
    run = Run()
    run.hello(0, 1)
    run.say(hold(1, 5))
    for rank in (0, 1):
        run.say(m.Ack(rank=rank, generation=1, passed=4))
    run.wait(400)  # the save took longer than the grace
    run.say(m.Left(rank=0, generation=1, updates_applied=5))
    run.say(m.Left(rank=1, generation=1, updates_applied=5))
    assert run.end(0) == 65
    assert any(line.startswith("the stop could not be completed: no word from ranks 0, 1 in time") for line in run.job.outcome().lines)
