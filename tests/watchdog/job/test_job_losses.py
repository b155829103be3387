"""Losses and norms that are no numbers: who is named, what stops the job, and which module it was."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from job_harness import BAD_TOKEN, Run, ended, orders, steps

from torch_watchdog.job.events import (
    OrderRequested,
    SendOrder,
)
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.rescue_words import Free


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
    run = Run(world_size=3)
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
        == "use bf16; this run has made no checkpoint that is known to be finite: resume from one of your own, from before step 0 "
        "(`watchdog checkpoint` makes one at any time)"
    )
    assert (incident["bound"]["module"], incident["batch"]["sample"]["dataset_index"]) == ("up", 23)
    assert incident["summary"].startswith("rank 0, step 0: the loss is nan")


def kept(rank: int, step: int) -> m.Noticed:
    fact = m.BatchFact(key="", also=({"samples": [40, 41]},))
    batch = m.Violation(
        kind=m.KEPT_BATCH, summary="", cause="", fix="", batch=fact, severity="warning", bundle=f"bundles/0-{rank}-step-{step}.safetensors"
    )
    return m.Noticed(rank=rank, step=step, micro_step=0, violation=batch)


@pytest.mark.parametrize("late", [False, True])
def test_the_batch_of_the_first_loss_that_is_nan_is_named_with_its_samples(late: bool) -> None:
    run = Run()
    run.hello(0, 1)
    told = [
        lambda: [run.say(kept(1, 1)), run.say(kept(0, 2))],
        lambda: run.report(steps(0, 0, [1.0, 1.0, math.nan]), steps(1, 0, [1.0, math.nan])),
    ]
    for tell in reversed(told) if late else told:
        tell()
    (incident,) = run.incidents
    assert incident["summary"] == "rank 1, step 1: the loss is nan, of a batch with samples 40, 41 of the data set"
    assert incident["evidence"] == {"samples": [40, 41], "bundle": "bundles/0-1-step-1.safetensors"}
    assert incident["cause"].count("that batch is kept for `watchdog replay`") == 1
    assert "that rank was given in step 1" in incident["fix"] and "resume from" in incident["fix"]


def test_the_batch_of_another_step_or_rank_is_not_that_of_the_loss() -> None:
    run = Run()
    run.hello(0, 1)
    run.say(kept(1, 0))
    run.say(kept(0, 1))
    run.report(steps(0, 0, [1.0, 1.0]), steps(1, 0, [1.0, math.nan]))
    assert run.kinds == ["loss.not_finite"]
    assert run.incidents[0]["evidence"] == {} and "samples" not in run.incidents[0]["summary"]


def test_what_another_rank_found_in_its_model_is_not_the_first_ranks_cause() -> None:
    run = Run()
    run.hello(0, 1)
    run.say(overflow(1))
    run.report(steps(0, 0, [math.nan]), steps(1, 0, [1.0, math.nan]))
    assert run.incidents[0]["bound"] is None
