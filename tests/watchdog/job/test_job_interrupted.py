"""A launch that somebody ends from outside: no rank has failed, whatever its ranks die of; what failed before, or by itself, is told all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_harness import Run, ended, exception, orders

from torch_watchdog.job.events import AppendEvent, OrderRequested
from torch_watchdog.job.first_failure import ASKED_FOR_S
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.rescue_words import Failed, Free, Look, Release
from torch_watchdog_proto.stop.events import TRAINING_ENDED

PEER = "RuntimeError: Connection closed by peer [127.0.0.1]:4242"
KEYBOARD = "KeyboardInterrupt: "


def asked(run: Run, *, at_ns: int = 1_000) -> None:
    """The launch gets SIGINT: its node says so of both ranks."""
    known = ended(0, 0)
    run.report(events=tuple(replace(known, rank=rank, pid=ended(rank, 0).pid, kind="asked", signal=2, time_ns=at_ns) for rank in (0, 1)))


def test_what_an_interrupt_takes_from_a_stop_is_not_told_as_the_end_of_the_training() -> None:
    """Its ranks end by their interpreters' end, where their script has handled the KeyboardInterrupt."""
    whys = []
    for wait_s in (0.0, ASKED_FOR_S):
        run = two_ranks()
        run.handle(OrderRequested(kind="order.stop", by="ann", reason=""))
        asked(run)
        run.now += wait_s
        for rank in (1, 0):
            run.say(m.Finished(rank=rank, passed=24))
        whys += [
            effect.event["text"] for effect in run.effects if isinstance(effect, AppendEvent) and effect.event["kind"] == "order.closed"
        ]
    assert [why.rpartition(": ")[2] for why in whys] == ["rank 1 is gone", TRAINING_ENDED]


def at(event: m.RankEvent, time_ns: int) -> m.RankEvent:
    return replace(event, time_ns=time_ns)


def two_ranks() -> Run:
    run = Run()
    run.hello(0, 1)
    return run


@pytest.mark.parametrize(
    "others_end",
    [
        (exception(0, 3, KEYBOARD), ended(0, 4, signal=2)),
        (exception(0, 3, PEER), ended(0, 4, exit_code=1)),
        (exception(0, 3, "RuntimeError: DataLoader worker (pid 77) exited unexpectedly with exit code 1"), ended(0, 4, exit_code=1)),
        (ended(0, 4, exit_code=1),),  # the script caught it
        (ended(0, 4, signal=9),),  # the launcher had waited for long enough
    ],
)
def test_an_interrupted_launch_has_no_failure_and_no_keeper_waits(others_end: tuple[m.RankEvent, ...]) -> None:
    run = two_ranks()
    asked(run)
    first = (at(exception(1, 1, KEYBOARD), 2_000), at(ended(1, 2, signal=2), 2_000))
    told = run.report(events=(*first, *(at(event, 3_000) for event in others_end)))
    assert [(rank, order) for rank, order in orders(told) if order is Release] == [(1, Release), (0, Release)]
    run.wait(30)
    assert run.end(1) is None and run.kinds == []


def test_a_rank_that_dies_of_the_signal_before_the_launch_has_looked_at_its_own_is_no_failure_either() -> None:
    run = two_ranks()
    run.report(events=(at(ended(1, 1, signal=2), 1_000_000_000),))
    asked(run, at_ns=1_500_000_000)
    run.report(events=(at(ended(0, 2, signal=2), 1_600_000_000),))
    run.wait(30)
    assert run.end(1) is None and run.kinds == []
    assert {rank for rank, order in orders(run.effects) if order is Release} == {0, 1}


def test_a_rank_that_only_lost_its_peer_to_the_interrupt_frees_nobody_and_may_end() -> None:
    run = two_ranks()
    asked(run)
    told = run.say(Failed(rank=0, step=3, time_ns=2_000, updates_applied=3, text=PEER))
    assert orders(told) == [(0, m.Leave)]


def test_a_rank_that_failed_before_the_interrupt_is_named() -> None:
    run = two_ranks()
    assert (1, Free) in [order for text in ("ValueError: no image",) for order in orders(run.say(raised(0, text, 500)))]
    asked(run)
    run.report(events=(at(ended(0, 1, exit_code=1), 2_000), at(ended(1, 2, signal=2), 2_000)))
    assert run.kinds == ["rank.exception"]


def test_an_error_of_its_own_on_the_way_out_is_named() -> None:
    run = two_ranks()
    asked(run)
    run.say(raised(0, "OSError: No space left on device", 2_000))
    run.report(events=(at(ended(0, 1, exit_code=1), 3_000), at(ended(1, 2, signal=2), 2_000)))
    run.wait(30)
    assert run.kinds == ["rank.exception"]


def test_a_training_that_goes_on_after_an_interrupt_is_judged_as_ever() -> None:
    run = two_ranks()
    asked(run)
    late = 1_000 + int((ASKED_FOR_S + 1) * 1e9)
    run.report(events=(at(ended(1, 1, signal=9), late),))
    run.wait(10)
    assert run.kinds == ["rank.died"]


def test_one_rank_that_got_the_signal_and_not_the_launch_is_named() -> None:
    run = two_ranks()
    run.report(events=(ended(1, 1, signal=2), exception(0, 2, PEER), ended(0, 3, exit_code=1)))
    assert run.kinds == ["rank.died"]


def test_nobody_is_asked_where_it_is_while_an_interrupted_launch_ends() -> None:
    run = standing_still()
    asked(run)
    assert Look not in [kind for _, kind in orders(run.wait(ASKED_FOR_S - 1))]
    assert Look in [kind for _, kind in orders(run.wait(2))]


def standing_still() -> Run:
    from job_harness import steps

    run = two_ranks()
    for step in range(6):
        run.report(steps(0, step, [1.0]), steps(1, step, [1.0]))
        run.now += 0.1
    return run


def raised(rank: int, text: str, time_ns: int) -> Failed:
    return Failed(rank=rank, step=3, time_ns=time_ns, updates_applied=3, text=text)
