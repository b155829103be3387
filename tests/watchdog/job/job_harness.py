"""A job that is moved by hand, without a clock: what its ranks and nodes say, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_watchdog.job.events import (
    Effect,
    NodeJoined,
    NodeLeft,
    RankSpoke,
    ReportCame,
    SendOrder,
    Tick,
    WriteIncident,
)
from torch_watchdog.job.job import Job
from torch_watchdog_proto import messages as m

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

    def __init__(self, policy: m.Policy = "stop", world_size: int = 2, max_skips: int | None = None, **more: Any) -> None:
        self.now, self.world_size, self.effects = 1_800_000_000.0, world_size, list[Effect]()
        self.job = Job(replace(HELLO, policy=policy, max_skips=max_skips), started_s=self.now, **more)
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
        return self.handle(ReportCame(node="node", report=m.NodeReport(seq=1, time_ns=0, steps=m.StepTable.of(blocks), events=events)))

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


def stop_at(run: Run, step: int, generation: int = 1, *, updates: int | None = None) -> None:
    """A bad batch on rank 1, and every rank does what it is told. `updates`: that the ranks had applied; None: as many as steps."""
    updates = step if updates is None else updates
    run.say(hold(1, step))
    for rank in range(run.world_size):
        run.say(m.Ack(rank=rank, generation=generation, passed=step - 1))
    for rank in range(run.world_size):
        run.say(m.Saved(rank=rank, generation=generation, updates_applied=updates, path="p", format="callback"))
    run.say(m.Committed(rank=0, generation=generation))
    for rank in range(run.world_size):
        run.say(m.Left(rank=rank, generation=generation, updates_applied=updates))
