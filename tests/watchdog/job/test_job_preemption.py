"""Signals that ask for a job's end: one order, however many ranks were signalled and how often."""

from __future__ import annotations

from typing import Any

import job_harness as harness
import pytest

from torch_watchdog.job.events import (
    AppendEvent,
    Effect,
    NodeJoined,
    OrderRequested,
    RankGone,
    RankSpoke,
    Refused,
    SendOrder,
    Tick,
    WriteIncident,
    WriteStacks,
)
from torch_watchdog.job.job import Job
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.rescue_words import Failed, Free, Look, Looked

PEER = "RuntimeError: Connection closed by peer [127.0.0.1]:4242"
RETRY_S = 1.0
STACK = '  File "/x/train.py", line 7, in main\n    while True:\n'


class Run:
    def __init__(self, policy: m.Policy = "stop", ranks: tuple[int, ...] = (0, 1)) -> None:
        hello = m.NodeHello(job="job", node="node", version="0.1.0", policy=policy, command=("train",), run_dir="/runs/job", session="s")
        self.now = 1_800_000_000.0
        self.job = Job(hello, started_s=self.now)
        self.handle(NodeJoined(hello=hello))
        for rank in ranks:
            self.hello(rank)

    def handle(self, event: Any) -> tuple[Effect, ...]:
        return self.job.handle(event, now=self.now)

    def hello(self, rank: int) -> None:
        self.say(m.RankHello(rank=rank, local_rank=rank, world_size=2, pid=10 + rank, attempt=0, host="h", version="0.1.0"))

    def say(self, message: m.RankMessage) -> tuple[Effect, ...]:
        return self.handle(RankSpoke(node="node", attempt=0, message=message))


def orders(effects: tuple[Effect, ...]) -> list[m.Order]:
    return [effect.tell.order for effect in effects if isinstance(effect, SendOrder)]


@pytest.mark.parametrize("number", [10, 15])
def test_a_signal_to_one_rank_stops_the_job_with_a_checkpoint_and_the_signals_code(number: int) -> None:
    run = Run()
    effects = run.say(m.Signalled(rank=1, signal=number))
    assert [type(order) for order in orders(effects)] == [m.Prepare, m.Prepare]
    (incident,) = (effect.incident for effect in effects if isinstance(effect, WriteIncident))
    assert incident["kind"] == "order.preemption" and "SIG" in incident["summary"]
    run.say(m.Ack(rank=0, generation=1, passed=3))
    commits = orders(run.say(m.Ack(rank=1, generation=1, passed=3)))
    assert {(commit.save, commit.leave, commit.exit_code) for commit in commits if isinstance(commit, m.Commit)} == {
        (True, True, 128 + number)
    }


def test_a_second_signal_to_whichever_rank_changes_nothing() -> None:
    run = Run()
    run.say(m.Signalled(rank=1, signal=15))
    assert orders(run.say(m.Signalled(rank=0, signal=15))) == orders(run.say(m.Signalled(rank=1, signal=10))) == []
    assert len(run.job.incidents) == 1


def test_an_order_that_cannot_be_given_yet_is_given_once_every_rank_is_there() -> None:
    run = Run(ranks=(0,))
    assert orders(run.say(m.Signalled(rank=0, signal=15))) == []
    run.hello(1)
    run.now += RETRY_S
    assert [type(order) for order in orders(run.handle(Tick()))] == [m.Prepare, m.Prepare]


def test_while_another_order_is_open_it_is_asked_for_once_and_again_behind_it() -> None:
    run = Run(policy="skip")
    hold(run, 0, 5)
    asked = run.say(m.Signalled(rank=0, signal=15))
    assert [effect.event["kind"] for effect in asked if isinstance(effect, AppendEvent)] == ["rank.signalled", "order.refused"]
    for _ in range(3):
        run.now += RETRY_S
        assert run.handle(Tick()) == ()
    skipped(run, 1, 5)
    assert asked_again(run) == [m.Prepare, m.Prepare]


def test_a_job_that_is_only_observed_is_left_alone() -> None:
    run = Run(policy="observe")
    assert run.say(m.Signalled(rank=0, signal=15)) == ()


BAD = m.Violation(kind="batch.index_out_of_range", summary="ids", cause="", fix="", batch=m.BatchFact(key="ids"), bound=None)


def hold(run: Run, rank: int, step: int) -> list[m.Order]:
    return orders(run.say(m.Hold(rank=rank, step=step, micro_step=0, violation=BAD, timeout_s=10.0)))


def skipped(run: Run, generation: int, step: int) -> None:
    for rank in (0, 1):
        run.say(m.Ack(rank=rank, generation=generation, passed=step - 1))
    for rank in (0, 1):
        run.say(m.Vetoed(rank=rank, generation=generation, step=step))


def asked_again(run: Run) -> list[type[m.Order]]:
    run.now += RETRY_S
    return [type(order) for order in orders(run.handle(Tick()))]


@pytest.mark.parametrize("decided", [False, True])
def test_a_signal_is_not_forgotten_for_a_bad_batch_that_is_skipped_first(decided: bool) -> None:
    """Found by reading: the machine was taken away with nothing saved, because the bad batch had displaced the order, and the training went on after it."""
    run = Run(policy="skip")
    run.say(m.Signalled(rank=1, signal=15))
    if decided:
        for rank in (0, 1):
            run.say(m.Ack(rank=rank, generation=1, passed=3))
    assert m.Prepare in map(type, hold(run, 1, 4))
    assert asked_again(run) == []
    skipped(run, 2, 4)
    assert asked_again(run) == [m.Prepare, m.Prepare]


def test_a_signal_that_waits_for_a_skip_is_not_forgotten_for_the_next_one() -> None:
    run = Run(policy="skip")
    hold(run, 1, 4)
    run.say(m.Signalled(rank=1, signal=15))
    skipped(run, 1, 4)
    hold(run, 0, 5)
    skipped(run, 2, 5)
    assert asked_again(run) == [m.Prepare, m.Prepare]


def test_a_signal_is_asked_for_once_where_it_was_given_up_for_good() -> None:
    run = Run(policy="skip")
    run.say(m.Signalled(rank=1, signal=15))
    run.say(m.CannotPromise(rank=0, generation=1, reason="a hook is off"))
    assert asked_again(run) == asked_again(run) == []


def promised() -> harness.Run:
    """Both ranks have trained for six steps and promised to stop for a signal."""
    run = harness.Run()
    run.hello(0, 1)
    for step in range(6):
        run.report(harness.steps(0, step, [1.0]), harness.steps(1, step, [1.0]))
        run.now += 0.1
    run.say(m.Signalled(rank=1, signal=15))
    for rank in (0, 1):
        run.say(m.Ack(rank=rank, generation=1, passed=5))
    return run


def stands_still(run: harness.Run, *, seconds: int, timeout_s: float) -> None:
    """Rank 0 waits for rank 1, whenever they are looked at."""
    for _ in range(seconds):
        looks = [effect.tell for effect in run.wait(1.0) if isinstance(effect, SendOrder) and isinstance(effect.tell.order, Look)]
        for look in looks:
            run.say(Looked(rank=look.rank, generation=look.order.generation, waits=look.rank == 0, stack=STACK, timeout_s=timeout_s))


def test_while_a_stop_waits_for_a_rank_that_stands_still_that_is_told_and_nobody_is_freed() -> None:
    run = promised()
    stands_still(run, seconds=60, timeout_s=20.0)
    status = run.job.status()
    assert status.standstill.startswith("rank 0 waits for rank 1: it is not in a collective")
    assert [rank.phase for rank in status.ranks] == ["train", "late"]
    way = "if that does not end by itself, `kill -9 101` on node ends rank 1, SIGTERM to the launch ends all: the ranks that wait save what they hold"
    for kind in ("order.cancel", "order.stop"):
        (refused,) = (effect for effect in run.handle(OrderRequested(kind=kind, by="ann", reason="")) if isinstance(effect, Refused))
        assert f"{status.standstill}; {way}" in refused.reason, refused.reason
    assert run.job.state == "stopping" and Free not in [kind for _, kind in harness.orders(run.effects)]
    events = [effect.event for effect in run.handle(RankGone(rank=1, pid=101, attempt=0)) if isinstance(effect, AppendEvent)]
    (closed,) = (event["text"] for event in events if event["kind"] == "order.closed")
    assert closed.endswith(": rank 1 is gone, and had not come to its next step by then")


def test_a_rank_that_was_late_and_is_killed_is_told_as_late_first() -> None:
    """As `watchdog stop` advises. It had been told as any other SIGKILL: want of memory, dmesg."""
    run = promised()
    stands_still(run, seconds=30, timeout_s=600.0)
    run.report(events=(harness.ended(1, 1, signal=9), harness.exception(0, 2, PEER), harness.ended(0, 3, exit_code=1)))
    (died,) = (incident for incident in run.incidents if incident["kind"] == "rank.died")
    assert died["summary"].startswith("rank 1, in step 6: it is not in a collective, but in ") and died["severity"] == "critical"
    assert died["summary"].endswith("; then it was killed by SIGKILL") and died["cause"].startswith(
        "rank 1 made no progress while the others waited"
    )
    assert "dmesg" not in died["fix"] and "memory" not in died["cause"] and died["fix"].startswith("look at its stack in ")
    (stacks,) = (effect.text for effect in run.effects if isinstance(effect, WriteStacks))
    assert STACK in stacks


def test_a_rank_that_was_late_is_not_to_be_killed_once_the_others_failure_lets_it_save() -> None:
    run = promised()
    stands_still(run, seconds=30, timeout_s=600.0)
    assert "late" in [rank.phase for rank in run.job.status().ranks]
    run.say(Failed(rank=0, step=6, time_ns=1, updates_applied=6, text="ValueError: a mistake"))
    status = run.job.status()
    assert "late" not in [rank.phase for rank in status.ranks] and "the watchdog itself" not in status.standstill


def test_a_refusal_while_ranks_are_waited_for_says_for_what_before_anybody_is_known_to_be_late() -> None:
    run, again = promised(), OrderRequested(kind="order.stop", by="ann", reason="")
    (refused,) = (effect for effect in run.handle(again) if isinstance(effect, Refused))
    assert refused.reason.endswith(
        "; it waits until every rank has come to the end of its step; `watchdog status` says who is late once that is known"
    )


def test_while_ranks_save_no_standstill_is_looked_for() -> None:
    run = promised()
    run.say(m.Saving(rank=0, generation=1, updates_applied=7))
    assert Look not in [kind for _ in range(60) for _, kind in harness.orders(run.wait(1.0))]
