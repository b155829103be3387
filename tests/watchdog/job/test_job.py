"""The job as others read it: its status, its counts, its numbers across daemons, its incidents and its end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from job_harness import BAD_TOKEN, SCHEMA, Run, ended, hold, steps, stop_at

from torch_watchdog.job.events import (
    AppendEvent,
    OrderRequested,
    Refused,
    ReportCame,
    SendOrder,
)
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.envelopes import OrderKind


def test_the_status_shows_each_ranks_newest_step_loss_and_time() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(steps(0, 0, [1.0, 0.5]), steps(1, 0, [2.0]))
    run.say(m.Finished(rank=1, passed=0))
    ranks = run.job.status().ranks
    assert [(r.last_step, r.loss, r.step_time_s, r.phase) for r in ranks] == [(1, 0.5, 2.0, "train"), (0, 2.0, 2.0, "end")]


def test_the_loss_that_is_shown_is_the_mean_of_the_newest_step_that_has_ended_however_its_batches_come() -> None:
    run = Run(world_size=1)

    def told(micro: list[tuple[int, float]], ended: tuple[int, ...]) -> float | None:
        columns: dict[str, Any] = {name: (1,) * len(micro) for name in ("micro_time_ns", "loader_ns")}
        columns |= {"micro_of_step": tuple(step for step, _ in micro), "loss": tuple(loss for _, loss in micro)}
        columns |= {"loss_known": (True,) * len(micro), "evaluation": (False,) * len(micro), "micro_step": (0,) * len(micro)}
        run.report(replace(steps(0, 0, ()), step=ended, step_time_ns=(1,) * len(ended), step_ns=(1,) * len(ended), **columns))
        return run.job.status().ranks[0].loss

    assert told([(0, 5.0)], ()) == 5.0
    assert told([(0, 2.0), (1, 4.0)], (0,)) == 3.5
    assert told([(1, 2.0), (2, 9.0)], (1,)) == 3.0
    assert told([(2, 11.0)], ()) == 3.0
    assert told([], (2,)) == 10.0
    assert told([(2, 13.0), (3, 1.0)], ()) == 11.0


def resumed_steps(rank: int, first: int, losses: Iterable[float], *, began: int) -> m.StepBlock:
    block = steps(rank, first, losses)
    return replace(block, updates_applied=tuple(began + step + 1 for step in block.step))


def test_the_status_of_a_resumed_rank_counts_updates_on() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(resumed_steps(0, 0, [1.0, 0.5], began=23))
    run.report(steps(1, 0, [2.0]))  # of a node whose version does not count them
    run.report(resumed_steps(0, 2, [0.4], began=23))
    assert [(r.last_step, r.updates_applied, r.began_at_update) for r in run.job.status().ranks] == [(2, 26, 23), (0, None, None)]


def test_an_incident_of_a_resumed_launch_names_the_updates_before_its_step() -> None:
    run = Run()
    run.hello(0, 1)
    run.report(resumed_steps(0, 0, [1.0] * 5, began=23), resumed_steps(1, 0, [1.0] * 5, began=23))
    stop_at(run, 5, updates=28)
    assert [(found["step"], found["framework_step"]) for found in run.incidents] == [(5, 28)]
    jsonschema.validate(run.incidents[0], json.loads(SCHEMA.read_text()))


def test_an_incident_that_is_found_before_the_first_report_names_them_at_the_end() -> None:
    run = Run()
    run.hello(0, 1)
    run.say(hold(1, 2))
    assert run.incidents[0]["framework_step"] is None
    run.report(resumed_steps(1, 0, [1.0] * 2, began=23))
    run.end(65)
    assert run.incidents[0]["framework_step"] == 25


def with_vetoes(block: m.StepBlock, *vetoed: int) -> m.StepBlock:
    before = [sum(skipped <= step for skipped in vetoed) for step in block.step]
    applied = tuple(step + 1 - left_out for step, left_out in zip(block.step, before, strict=True))
    return replace(block, updates_applied=applied, vetoed=tuple(step in vetoed for step in block.step))


@pytest.mark.parametrize("reported", [6, 7, 8, 9])
def test_steps_that_were_left_out_since_the_newest_report_are_no_updates(reported: int) -> None:
    """Steps 3 and 6 were: 6 updates before step 8, whatever of the last skip has been reported, and no checkpoint says it."""
    run = Run("skip")
    run.hello(0, 1)
    for number, step in enumerate((3, 6), 1):
        run.say(hold(1, step))
        for rank in (0, 1):
            run.say(m.Ack(rank=rank, generation=number, passed=step - 1))
        for rank in (0, 1):
            run.say(m.Vetoed(rank=rank, generation=number, step=step))
    vetoed = (3, 6, 8) if reported == 9 else (3, 6)
    run.report(*(with_vetoes(steps(rank, 0, [1.0] * reported), *vetoed) for rank in (0, 1)))
    run.say(hold(1, 8))
    assert run.incidents[-1]["framework_step"] == 6


def test_the_updates_before_a_stop_are_those_that_its_checkpoint_holds() -> None:
    """A daemon that came back in between has heard of no skip."""
    run = Run()
    run.hello(0, 1)
    run.report(*(resumed_steps(rank, 0, [1.0] * 5, began=0) for rank in (0, 1)))
    stop_at(run, 8, updates=6)
    assert [(found["step"], found["framework_step"]) for found in run.incidents] == [(8, 6)]


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


def test_ranks_whose_command_has_ended_before_them_are_not_called_gone() -> None:
    run = Run()
    run.hello(0, 1)
    run.handle(OrderRequested(kind="order.stop", by="ann", reason="now"))
    run.end(137)
    (incident,) = run.incidents
    assert "the command on node has ended, and nobody speaks to rank 0 any more" in incident["summary"]


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


def test_an_order_whose_checkpoint_holds_nan_says_so_in_its_incident_its_event_and_at_the_end() -> None:
    run = Run(world_size=2)
    run.hello(0, 1)
    run.handle(OrderRequested(kind="order.stop", by="ann", reason="now"))
    for rank in (0, 1):
        run.say(m.Ack(rank=rank, generation=1, passed=2))
    for rank in (0, 1):
        run.say(m.Saved(rank=rank, generation=1, updates_applied=3, path="/r/step-3", format="dcp", finite=rank == 0))
    run.say(m.Committed(rank=0, generation=1))
    for rank in (0, 1):
        run.say(m.Left(rank=rank, generation=1, updates_applied=3))
    why = "NaN, infinity or a part of a step that could not be taken back is in what rank 1 saved, which is kept aside as not good"
    (incident,) = run.incidents
    assert incident["summary"].endswith(f"now; no checkpoint: {why}")
    made = incident["action"]["checkpoint"]
    assert (made["path"], made["committed"], made["finite"]) == ("/r/not-good.step-3", False, False)
    (event,) = (effect.event for effect in run.effects if isinstance(effect, AppendEvent) and effect.event["kind"] == "order.closed")
    assert event["text"].endswith(why)
    assert f"no good checkpoint was made: {why}" in run.job.outcome().lines


def test_whoever_asks_for_a_stop_of_a_job_that_has_just_stopped_is_told_so() -> None:
    run = Run(world_size=2)
    run.hello(0, 1)
    stop_at(run, 3)
    kinds: tuple[OrderKind, ...] = ("order.stop", "order.checkpoint", "order.cancel")
    for kind in kinds:
        answers = run.handle(OrderRequested(kind=kind, by="ann", reason=""))
        reasons = [effect.reason for effect in answers if isinstance(effect, Refused)]
        assert reasons == [f"it has stopped already, and is about to end: {BAD_TOKEN.summary}"]


def test_why_no_checkpoint_was_made_is_told_at_the_end() -> None:
    run = Run(world_size=1)
    run.hello(0)
    run.say(hold(0, 3))
    run.say(m.Ack(rank=0, generation=1, passed=2))
    run.say(m.Saved(rank=0, generation=1, updates_applied=3, error="OSError: No space left on device"))
    run.say(m.Left(rank=0, generation=1, updates_applied=3))
    assert "no good checkpoint was made: rank 0: OSError: No space left on device" in run.job.outcome().lines


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
    told = [effect.tell.order for effect in run.effects if isinstance(effect, SendOrder)]
    given_up = [(order.aim, order.reason[:31]) for order in told if isinstance(order, m.Abandon)]
    assert given_up == [("the stop for the bad batch", "no word from ranks 0, 1 in time")] * 2
    assert run.job.outcome().lines == ()  # a node has said so as it happened
