"""A job of two nodes with two ranks each, as its store would give it: steps with phases, a GPU, a bad batch on rank 1."""

from __future__ import annotations

from typing import Any

from torch_watchdog.report.history import JobHistory, history_of
from torch_watchdog_proto.messages import GpuSample, NodeReport, StepBlock, StepTable

SECOND = 10**9
START_NS = 1_700_000_000 * SECOND
RECORD: dict[str, Any] = {
    "job": "train-1", "started": "2023-11-14T22:13:20Z", "ended": "2023-11-14T22:13:26Z", "exit_code": 65, "exit_reason": "stopped",
    "command": ["torchrun", "train.py"], "versions": {"torch_watchdog": "0.1.0", "python": "3.11"},
}  # fmt: skip
INCIDENT: dict[str, Any] = {
    "id": "1", "kind": "batch.index_out_of_range", "severity": "critical", "status": "firing", "time": "2023-11-14T22:13:25+00:00",
    "attempt": 0, "origin": {"rank": 1, "node": "node-0"}, "step": 5, "summary": "rank 1, step 5: input_ids[2,7] is 70",
    "cause": "the tokenizer belongs to another model", "fix": "load the one that matches", "ranks_affected": [0, 2, 3],
    "batch": {"key": "input_ids", "element": [2, 7], "value": 70, "shape": [4, 16], "dtype": "int64"},
    "bound": {"low": 0, "high": 63, "op": "embedding", "module": "wte"}, "evidence": {},
    "action": {"policy": "stop", "prevented": True, "ranks_stopped": [0, 1, 2, 3], "stopped_at_step": 5, "seconds_to_stop": 0.4, "exit_code": 65,
               "checkpoint": {"path": "runs/train-1/checkpoints/step-5", "committed": True, "updates_applied": 5}},
}  # fmt: skip


def block(rank: int, num_steps: int, *, attempt: int = 0, first_loss: float = 2.0, **columns: Any) -> StepBlock:
    """One second a step: 0.1 s of it waiting for the loader, 0.3 s forward."""
    steps = tuple(range(num_steps))
    ends = tuple(START_NS + (step + 1) * SECOND for step in steps)
    values: dict[str, Any] = {
        "micro_step": (0,) * num_steps, "micro_of_step": steps, "micro_time_ns": tuple(end - SECOND * 9 // 10 for end in ends),
        "loader_ns": (SECOND // 10,) * num_steps, "forward_ns": (SECOND * 3 // 10,) * num_steps,
        "loss": tuple(first_loss - 0.1 * step for step in steps), "loss_known": (True,) * num_steps, "evaluation": (False,) * num_steps,
        "step": steps, "step_time_ns": ends, "step_ns": (SECOND,) * num_steps, "vetoed": tuple(step == 5 for step in steps),
        "peak_bytes": (2**30,) * num_steps, "allocated_bytes": (2**29,) * num_steps, "gpu": f"GPU-{rank}",
    }  # fmt: skip
    return StepBlock(rank=rank, attempt=attempt, pid=100 + rank, first_record=1, **(values | columns))


def gpu(rank: int, second: int, **more: Any) -> GpuSample:
    known: dict[str, Any] = {"memory_used_bytes": 2**33, "memory_total_bytes": 2**36, "temperature_c": 60 + second, "power_w": 400.0}
    return GpuSample(time_ns=START_NS + second * SECOND, index=rank, uuid=f"GPU-{rank}", name="H100", **(known | more))


def history(num_steps: int = 6, *, ranks: int = 4, incidents: tuple[dict[str, Any], ...] = (INCIDENT,), **columns: Any) -> JobHistory:
    reports = [
        (
            f"node-{rank // 2}",
            "s",
            NodeReport(seq=rank, time_ns=1, steps=StepTable.of((block(rank, num_steps, **columns),)), gpus=(gpu(rank, 1), gpu(rank, 2))),
        )
        for rank in range(ranks)
    ]
    return history_of("train-1", RECORD, reports, incidents=incidents)
