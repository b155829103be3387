"""What the rules find becomes incidents of the job: one a subject, valid by the schema, over when the sign is; and never in an order's way."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from torch_watchdog.job.events import (
    AppendEvent,
    Effect,
    NodeJoined,
    NodeLeft,
    RankSpoke,
    ReportCame,
    SendOrder,
    Tick,
    WriteIncident,
    WriteStacks,
)
from torch_watchdog.job.job import Job
from torch_watchdog.knowledge import xid_codes
from torch_watchdog_proto import messages as m
from torch_watchdog_proto.rescue_words import Look

SCHEMA = Path(__file__).resolve().parents[3] / "proto" / "torch_watchdog_proto" / "incident.schema.json"


class Run:
    """A job of two ranks, one on each of two GPUs, with a hand-moved clock."""

    def __init__(self, *, rules: Mapping[str, Any] | None = None, incidents: tuple[Mapping[str, Any], ...] = ()) -> None:
        self.now, self.effects = 1_800_000_000.0, list[Effect]()
        hello = m.NodeHello(
            job="job", node="node", version="0.1.0", policy="stop", command=("train",), run_dir="/runs/job", session="s", rules=rules or {}
        )
        self.job = Job(hello, started_s=self.now, codes=xid_codes(), incidents=incidents)
        self.handle(NodeJoined(hello=hello))
        for rank in range(2):
            said = m.RankHello(rank=rank, local_rank=rank, world_size=2, pid=100 + rank, attempt=0, host="node", version="0.1.0")
            self.handle(RankSpoke(node="node", attempt=0, message=said))

    def handle(self, event: Any) -> tuple[Effect, ...]:
        effects = self.job.handle(event, now=self.now)
        self.effects += effects
        return effects

    def step(self, step: int, *, losses: tuple[float, float] = (1.0, 1.0), norm: float = -1.0, gpus: tuple[m.GpuSample, ...] = ()) -> None:
        """One second and one step of both ranks."""
        self.now += 1.0
        blocks = tuple(block(rank, step, loss, norm) for rank, loss in enumerate(losses))
        self.handle(ReportCame(node="node", report=m.NodeReport(seq=1, time_ns=0, steps=m.StepTable.of(blocks), gpus=gpus)))
        self.handle(Tick())

    def spike(self) -> None:
        for step in range(50):
            self.step(step)
        for step in range(50, 56):
            self.step(step, losses=(1.0, 20.0))

    @property
    def incidents(self) -> list[dict[str, Any]]:
        newest = {effect.incident["id"]: dict(effect.incident) for effect in self.effects if isinstance(effect, WriteIncident)}
        for incident in newest.values():
            jsonschema.validate(incident, json.loads(SCHEMA.read_text()))
        return list(newest.values())

    @property
    def events(self) -> list[str]:
        return [str(effect.event["kind"]) for effect in self.effects if isinstance(effect, AppendEvent)]

    def waits_for_data(self) -> None:
        """Rank 1, from step 40 on."""
        for step in range(40 + 24):
            self.now += 1.0
            slow = step >= 40
            blocks = (replace(block(rank, step, 1.0, -1.0), loader_ns=(200_000_000 if slow and rank else 1_000_000,)) for rank in range(2))
            timed = tuple(replace(one, step_ns=(210_000_000 if slow else 10_000_000,)) for one in blocks)
            self.handle(ReportCame(node="node", report=m.NodeReport(seq=1, time_ns=0, steps=m.StepTable.of(timed))))
            self.handle(Tick())

    def workers(self, text: str) -> tuple[Effect, ...]:
        """The node's answer for rank 1."""
        event = m.RankEvent(rank=1, attempt=0, pid=101, kind="workers", time_ns=0, order=1, text=text)
        return self.handle(ReportCame(node="node", report=m.NodeReport(seq=1, time_ns=0, events=(event,))))


def block(rank: int, step: int, loss: float, norm: float) -> m.StepBlock:
    return m.StepBlock(
        rank=rank, attempt=0, pid=100 + rank, first_record=1, micro_step=(0,), micro_of_step=(step,), micro_time_ns=(1,), loader_ns=(1,), loss=(loss,),
        loss_known=(True,), evaluation=(False,), step=(step,), step_time_ns=(1,), step_ns=(10_000_000,), vetoed=(False,), updates_applied=(step + 1,),
        grad_norm=(norm,), gpu=f"GPU-{rank}",
    )  # fmt: skip


def sample(rank: int, **more: Any) -> m.GpuSample:
    return m.GpuSample(time_ns=1, index=rank, uuid=f"GPU-{rank}", name="NVIDIA H100", memory_used_bytes=1, memory_total_bytes=2, **more)


def test_a_finding_is_an_incident_of_its_rank_and_the_training_goes_on() -> None:
    run = Run()
    run.spike()
    (incident,) = run.incidents
    assert (incident["kind"], incident["severity"], incident["status"]) == ("loss.spike", "warning", "firing")
    assert incident["origin"] == {"rank": 1, "local_rank": 1, "node": "node", "pid": 101}
    assert (incident["action"]["policy"], incident["action"]["prevented"]) == ("none", False)
    assert not [effect for effect in run.effects if isinstance(effect, SendOrder)]


def test_a_sign_that_goes_and_comes_again_is_one_incident_that_is_over_and_fires_again() -> None:
    """Its step and its sentence are of the same time: one that was over had said "all 2 ranks, step 236" with 218 as its step."""
    run = Run(rules={"loss_spike": {"keep_s": 2}})
    run.spike()
    for step in range(56, 70):
        run.step(step)
    assert [incident["status"] for incident in run.incidents] == ["resolved"]
    for step in range(70, 76):
        run.step(step, losses=(1.0, 20.0))
    assert [incident["status"] for incident in run.incidents] == ["firing"]
    told = [
        (effect.incident["step"], effect.incident["summary"].partition(":")[0])
        for effect in run.effects
        if isinstance(effect, WriteIncident)
    ]
    assert told == [(55, "rank 1, step 55"), (55, "rank 1, step 55"), (75, "rank 1, step 75")]
    assert [kind for kind in run.events if kind.startswith("incident")] == ["incident", "incident.over", "incident"]


def test_a_daemon_that_takes_over_does_not_tell_the_same_again() -> None:
    before = Run()
    before.spike()
    after = Run(incidents=tuple(before.incidents))
    after.spike()
    assert after.incidents == []
    assert len(after.job.incidents) == 1


def test_a_job_that_fails_after_a_fault_of_the_hardware_ends_with_75() -> None:
    run = Run()
    run.step(0, gpus=(sample(0), sample(1)))
    run.step(1, gpus=(sample(0), sample(1, xids=(79,))))
    run.handle(NodeLeft(node="node", goodbye=m.NodeGoodbye(exit_code=1)))
    assert run.job.outcome().exit_code == 75
    (incident,) = [incident for incident in run.incidents if incident["kind"] == "gpu.xid"]
    assert incident["origin"]["gpu"]["index"] == 1
    assert incident["evidence"]["xid"] == [{"code": 79, "time_ns": 1}]


def test_a_job_that_ends_well_keeps_its_code_whatever_its_gpus_said() -> None:
    run = Run()
    run.step(0, gpus=(sample(1, xids=(79,)),))
    run.handle(NodeLeft(node="node", goodbye=m.NodeGoodbye(exit_code=0)))
    assert run.job.outcome().exit_code is None


def test_a_gradient_that_is_no_number_stops_the_job_and_says_from_where_to_go_on() -> None:
    good = {
        "path": "/runs/job/checkpoints/step-3",
        "updates_applied": 3,
        "committed": True,
        "finite": True,
        "saved_by": [0, 1],
        "format": "dcp",
    }
    earlier = Run()
    earlier.spike()
    (known,) = earlier.incidents
    run = Run(incidents=(known | {"action": known["action"] | {"checkpoint": good}},))
    for step in range(6):
        run.step(step, norm=math.nan if step == 4 else 1.0)
    (incident,) = run.incidents
    assert (incident["kind"], incident["step"], incident["origin"]["rank"]) == ("grad.not_finite", 4, None)
    assert incident["fix"].endswith("resume from /runs/job/checkpoints/step-3, the newest checkpoint that is finite (3 updates)")
    assert [effect.tell.rank for effect in run.effects if isinstance(effect, SendOrder)][:2] == [0, 1]


def test_a_mistake_in_a_rule_ends_the_rules_and_nothing_else() -> None:
    run = Run()
    shapeless = m.TensorColumns(
        key="x", dtype="int64", rows=(5,), low=(0,), high=(1,), negatives=(0,), ignored=(1,), finite=(True,), shapes=((1,),)
    )  # fmt: skip
    wrong = m.StepBlock(rank=0, attempt=0, pid=100, first_record=1, micro_step=(0,), micro_of_step=(0,), tensors=(shapeless,))
    run.handle(ReportCame(node="node", report=m.NodeReport(seq=1, time_ns=0, steps=m.StepTable.of((wrong,)))))
    run.spike()
    assert run.events.count("rules.failed") == 1
    assert run.incidents == []
    run.step(60, losses=(math.nan, 1.0))
    run.step(61, losses=(1.0, 1.0))
    assert [incident["kind"] for incident in run.incidents] == ["loss.not_finite"]


LOOKED = (
    "rank, pid 101: waits, in Queue.get (queue.py:9)\n    Queue.get (queue.py:9)\n"
    "worker, pid 7: waits for a disk or a network (nfs_wait), in Rows.__getitem__ (t.py:6)\n    Rows.__getitem__ (t.py:6)\n"
)


def test_of_a_rank_that_waits_for_its_data_the_node_is_asked_once_what_its_workers_do() -> None:
    run = Run()
    run.waits_for_data()
    asked = [effect.tell for effect in run.effects if isinstance(effect, SendOrder)]
    assert [(one.rank, one.order) for one in asked] == [(1, Look(generation=0))]
    (before,) = run.incidents
    effects = run.workers(LOOKED)
    (incident,) = run.incidents
    assert incident["cause"] == before["cause"] + (
        "; when they were looked at: rank, pid 101: waits, in Queue.get (queue.py:9); "
        "worker, pid 7: waits for a disk or a network (nfs_wait), in Rows.__getitem__ (t.py:6)"
    )
    assert incident["evidence"]["stacks"] == "stacks.txt"
    assert [(one.incident_id, one.text) for one in effects if isinstance(one, WriteStacks)] == [(incident["id"], LOOKED)]
    assert not [one for one in run.workers(LOOKED) if isinstance(one, (WriteStacks, WriteIncident))]


def test_what_workers_do_that_nobody_asked_for_changes_no_incident() -> None:
    run = Run()
    run.spike()
    assert not [one for one in run.workers(LOOKED) if isinstance(one, (WriteStacks, WriteIncident))]
