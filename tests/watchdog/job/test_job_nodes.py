"""A job of several nodes: its ranks decide together, and a node may leave late, or be lost and come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torch_watchdog.job.events import (
    AppendEvent,
    Effect,
    NodeAway,
    NodeJoined,
    NodeLeft,
    OrderRequested,
    RankGone,
    RankSpoke,
    Refused,
    ReportCame,
    SendOrder,
    Tick,
)
from torch_watchdog.job.job import Job
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.rescue_words import Failed, Free, Look, Looked, Release

HELLO = m.NodeHello(
    job="job", node="a", version="0.1.0", policy="stop", command=("train",), run_dir="/runs/job", session="s", nodes=2, rendezvous="r"
)  # fmt: skip
ASKED = OrderRequested(kind="order.stop", by="ann", reason="")


class Run:
    """Rank 0 on node a, rank 1 on node b."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.job = Job(HELLO, started_s=self.now)
        for node, rank in (("a", 0), ("b", 1)):
            self.handle(NodeJoined(hello=replace(HELLO, node=node, run_dir=f"/of/{node}")))
            self.connect(node, rank)

    def handle(self, event: Any) -> tuple[Effect, ...]:
        return self.job.handle(event, now=self.now)

    def connect(self, node: str, rank: int) -> None:
        hello = m.RankHello(rank=rank, local_rank=0, world_size=2, pid=10 + rank, attempt=0, host=node, version="0.1.0")
        self.handle(RankSpoke(node=node, attempt=0, message=hello))

    def leave(self, node: str, exit_code: int = 0) -> None:
        self.handle(NodeLeft(node=node, goodbye=m.NodeGoodbye(exit_code=exit_code)))

    def rank_ends(self, node: str, rank: int, words: str = "", **how: Any) -> None:
        about = {"rank": rank, "attempt": 0, "pid": 10 + rank, "time_ns": 0}
        note = m.RankEvent(**about, kind="note", order=1, text=words, level="error")
        end = m.RankEvent(**about, kind="exited", order=2, **how)
        self.handle(ReportCame(node=node, report=m.NodeReport(seq=1, time_ns=0, events=(note, end))))


def refusals(effects: tuple[Effect, ...]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Refused)]


def test_an_order_goes_to_the_ranks_of_every_node_and_saves_where_the_first_node_keeps_its_files() -> None:
    run = Run()
    told = [effect for effect in run.handle(ASKED) if isinstance(effect, SendOrder)]
    assert [(tell.node, tell.tell.rank) for tell in told] == [("a", 0), ("b", 1)]
    for node, rank in (("a", 0), ("b", 1)):
        effects = run.handle(RankSpoke(node=node, attempt=0, message=m.Ack(rank=rank, generation=1, passed=3)))
    commits = [effect.tell.order for effect in effects if isinstance(effect, SendOrder)]
    assert [commit.path for commit in commits if isinstance(commit, m.Commit)] == ["/runs/job/checkpoints/step-5"] * 2


def test_the_job_ends_with_its_last_node_and_its_exit_code_is_the_highest() -> None:
    run = Run()
    run.leave("a", 0)
    assert run.job.state == "running"
    run.leave("b", 3)
    assert (run.job.state, run.job.status().exit_code) == ("ended", 3)


def test_who_failed_first_is_not_judged_by_a_node_that_leaves_before_the_others_have_told() -> None:
    """The command on node a ends because of a rank on node b whose end is told only then."""
    run = Run()
    run.rank_ends("a", 0, "RuntimeError: Connection closed by peer", exit_code=1)
    run.leave("a", 1)
    assert run.job.incidents == ()
    run.rank_ends("b", 1, signal=9)
    run.leave("b", 1)
    (incident,) = run.job.incidents
    assert (incident["origin"]["rank"], incident["origin"]["node"]) == (1, "b")


def test_a_node_that_is_away_is_said_so_once_and_an_order_that_needs_it_is_refused_at_once() -> None:
    run = Run()
    (said,) = (effect for effect in run.handle(NodeAway(node="b")) if isinstance(effect, AppendEvent))
    assert said.event["kind"] == "node.away" and "node b" in said.event["text"]
    assert refusals(run.handle(ASKED)) == ["rank 1 cannot be reached: 1 of 2 answered so far"]


def test_a_node_that_comes_back_is_asked_again() -> None:
    run = Run()
    run.handle(NodeAway(node="b"))
    (said,) = run.handle(NodeJoined(hello=replace(HELLO, node="b")))
    assert isinstance(said, AppendEvent) and said.event["kind"] == "node.back"
    run.connect("b", 1)
    assert refusals(run.handle(ASKED)) == []


def test_a_node_that_is_lost_in_the_middle_of_an_order_has_until_its_deadline() -> None:
    run = Run()
    run.handle(ASKED)
    run.handle(NodeAway(node="b"))
    run.handle(NodeJoined(hello=replace(HELLO, node="b")))
    run.connect("b", 1)
    for node, rank in (("a", 0), ("b", 1)):
        effects = run.handle(RankSpoke(node=node, attempt=0, message=m.Ack(rank=rank, generation=1, passed=3)))
    assert sum(isinstance(effect, SendOrder) and isinstance(effect.tell.order, m.Commit) for effect in effects) == 2


def test_a_node_that_stays_away_past_the_end_of_an_order_is_not_waited_for_by_the_next() -> None:
    run = Run()
    run.handle(ASKED)
    run.handle(NodeAway(node="b"))
    run.now += 11
    run.handle(Tick())
    assert refusals(run.handle(ASKED)) == ["rank 1 cannot be reached: 1 of 2 answered so far"]
    run.handle(NodeJoined(hello=replace(HELLO, node="b")))
    run.connect("b", 1)
    assert refusals(run.handle(ASKED)) == []


def stands_still(run: Run, *, until: float) -> list[Any]:
    """Rank 0 waits in a collective, and says so whenever it is asked; what was told in that time."""
    told: list[Any] = []
    while run.now < until:
        run.now += 0.5
        orders = [effect.tell for effect in run.handle(Tick()) if isinstance(effect, SendOrder)]
        told += [tell.order for tell in orders]
        for tell in orders:
            if isinstance(tell.order, Look) and tell.rank == 0:
                here = Looked(rank=0, generation=tell.order.generation, waits=True, stack="", timeout_s=600.0, step=5)
                run.handle(RankSpoke(node="a", attempt=0, message=here))
    return told


def report(run: Run, seq: int, **columns: Any) -> None:
    block = m.StepBlock(rank=0, attempt=0, pid=10, first_record=seq, **columns)
    run.handle(ReportCame(node="a", report=m.NodeReport(seq=seq, time_ns=0, steps=m.StepTable.of((block,)))))


def test_a_standstill_is_in_the_status_until_a_step_comes_and_a_batch_that_a_rank_ended_in_is_none() -> None:
    run = Run()
    for step in range(5):
        run.now += 1
        report(run, step + 1, step=(step,), step_ns=(1,))
    assert run.job.status().standstill == ""
    stands_still(run, until=run.now + 15)
    assert run.job.status().standstill.startswith("rank 0 waits for rank 1: ")
    report(run, 6, micro_step=(0,), micro_of_step=(5,), micro_time_ns=(0,), loader_ns=(0,), loss=(0.0,), loss_known=(False,))
    assert run.job.status().standstill
    report(run, 7, step=(5,), step_ns=(1,))
    assert run.job.status().standstill == ""


def test_a_batch_that_a_rank_writes_out_as_an_interrupt_ends_it_ends_no_standstill_and_a_second_one_does() -> None:
    run = Run()
    for step in range(5):
        run.now += 1
        report(run, step + 1, step=(step,), step_ns=(1,))
    in_hand: dict[str, Any] = {"micro_step": (0,), "micro_of_step": (5,), "loader_ns": (1,), "loss": (1.0,), "loss_known": (True,)}
    stands_still(run, until=run.now + 15)
    report(run, 6, **in_hand, micro_time_ns=(1,))
    assert run.job.status().standstill.startswith("rank 0 waits for rank 1: ")
    report(run, 7, **in_hand, micro_time_ns=(2,))
    assert run.job.status().standstill == ""


def test_a_network_that_fails_for_a_while_ends_no_job() -> None:
    """Found by reading: the node was back, and its ranks were ended two seconds later, because what they had been asked was lost with the line."""
    run = Run()
    for step in range(5):
        run.now += 1
        report(run, step + 1, step=(step,), step_ns=(1,))
    began = run.now
    assert not any(isinstance(order, Free) for order in stands_still(run, until=began + 15))
    run.handle(NodeAway(node="b"))
    stands_still(run, until=began + 19)
    run.handle(NodeJoined(hello=replace(HELLO, node="b")))
    run.connect("b", 1)
    told = stands_still(run, until=began + 60)  # it is slow to answer
    assert any(isinstance(order, Look) for order in told) and not any(isinstance(order, Free) for order in told)
    assert refusals(run.handle(ASKED)) == []
    run.now += 11
    run.handle(Tick())
    run.handle(NodeAway(node="b"))
    assert any(isinstance(order, Free) for order in stands_still(run, until=run.now + 30)), "one that stays away counts as gone"


def test_an_elastic_launch_that_has_got_a_node_starts_anew_with_more_ranks_and_all_of_them_stop() -> None:
    """torchrun counts no restart then: the ranks of the new world have the number of the old attempt."""
    run = Run()
    for rank in (0, 1):
        run.handle(RankGone(attempt=0, rank=rank, pid=10 + rank))
    for node, rank in (("a", 0), ("b", 1), ("c", 2)):
        hello = m.RankHello(rank=rank, local_rank=0, world_size=3, pid=20 + rank, attempt=0, host=node, version="0.1.0")
        run.handle(RankSpoke(node=node, attempt=0, message=hello))
        if rank < 2:
            assert refusals(run.handle(ASKED)) != []
    told = [effect.tell.rank for effect in run.handle(ASKED) if isinstance(effect, SendOrder)]
    assert told == [0, 1, 2] and run.job.status().world_size == 3


def test_what_a_rank_says_and_suffers_that_this_job_does_not_have_is_of_no_account() -> None:
    run = Run()
    hello = m.RankHello(rank=2, local_rank=0, world_size=2, pid=12, attempt=0, host="b", version="0.1.0")
    assert run.handle(RankSpoke(node="b", attempt=0, message=hello)) == ()
    for rank in (0, 2):
        other = m.RankHello(rank=rank, local_rank=0, world_size=8, pid=99, attempt=0, host="b", version="0.1.0")
        assert run.handle(RankSpoke(node="b", attempt=0, message=other)) == ()
    run.rank_ends("b", 2, exit_code=1)
    assert refusals(run.handle(ASKED)) == []
    run.leave("a")
    run.leave("b")
    assert [found["kind"] for found in run.job.incidents] == ["order.stop"] and [rank.rank for rank in run.job.status().ranks] == [0, 1]


def test_nobody_waits_for_the_goodbye_of_a_node_that_is_away() -> None:
    run = Run()
    run.handle(NodeAway(node="b"))
    assert run.job.state == "running"
    run.leave("a")
    assert run.job.state == "ended"


def test_the_end_of_a_stream_after_the_goodbye_is_no_loss() -> None:
    run = Run()
    run.leave("a")
    assert run.handle(NodeAway(node="a")) == ()


def gives_up(run: Run) -> list[Any]:
    """Rank 0 has waited for as long as it may: what is told to rank 1."""
    word = Failed(
        rank=0, step=5, updates_applied=5, time_ns=1, text="RuntimeError: Timed out waiting 8000ms for recv operation to complete"
    )
    effects = run.handle(RankSpoke(node="a", attempt=0, message=word))
    return [effect.tell.order for effect in effects if isinstance(effect, SendOrder) and effect.tell.rank == 1]


def test_whom_a_rank_waited_for_is_asked_where_it_is_before_it_is_freed_from_there() -> None:
    run = Run()
    look, free = gives_up(run)
    assert isinstance(look, Look) and isinstance(free, Free)
    there = Looked(rank=1, generation=look.generation, waits=False, stack='  File "/x/train.py", line 7, in main\n', timeout_s=8.0, step=5)
    run.handle(RankSpoke(node="b", attempt=0, message=there))
    run.now += 30
    run.handle(Tick())
    (incident,) = run.job.incidents
    assert (incident["kind"], incident["origin"]["rank"], incident["step"], incident["ranks_affected"]) == ("rank.hang", 1, 5, [0])


@pytest.mark.parametrize("by", [9, 15])
def test_of_a_rank_that_did_not_move_it_is_told_who_ended_it_and_nothing_that_would_let_it_go_on(by: int) -> None:
    run = Run()
    gives_up(run)
    state = m.RankEvent(rank=1, attempt=0, pid=11, kind="state", time_ns=0, order=1, text="T")
    run.handle(ReportCame(node="b", report=m.NodeReport(seq=1, time_ns=0, events=(state,))))
    run.now += 30
    told = [effect.tell for effect in run.handle(Tick()) if isinstance(effect, SendOrder)]
    assert (1, Release(generation=0, kill=True)) in [(tell.rank, tell.order) for tell in told], told
    (incident,) = run.job.incidents
    assert "SIGSTOP" in incident["summary"] and "until it is ended, `kill -CONT`" in incident["fix"]
    run.rank_ends("b", 1, signal=by)
    run.leave("a", 1)
    run.leave("b", 1)
    (incident,) = run.job.incidents
    assert incident["fix"] == "find who stopped it: a debugger, a scheduler that suspends jobs, a shell's Ctrl-Z"
    assert incident["cause"].count("the watchdog ended by SIGKILL what made no progress") == (by == 9)


def test_a_rank_on_a_node_that_is_away_is_not_blamed_for_its_code_and_nobody_waits_for_its_end() -> None:
    run = Run()
    run.handle(NodeAway(node="b"))
    gives_up(run)
    released: list[int] = []
    for _ in range(40):
        run.now += 0.5
        told = [effect.tell for effect in run.handle(Tick()) if isinstance(effect, SendOrder)]
        released += [tell.rank for tell in told if isinstance(tell.order, Release)]
        if len(released) == 2:
            break
    (incident,) = run.job.incidents
    assert (incident["kind"], incident["origin"]["rank"]) == ("rank.hang", 1)
    assert "its node cannot be reached" in incident["summary"]
    assert released == [1, 0]
    run.leave("a", 1)
    assert run.job.status().exit_code == m.EXIT_MACHINE
