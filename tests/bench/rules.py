"""How many ranks the rules judge on one core: `python tests/bench/rules.py [RANKS]`. One step a second of each, reported by nodes of 8 ranks.

Prints CPU seconds per second of training, for the engine alone and for the whole Job that a daemon runs, and the memory that they take.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time

from torch_watchdog.job.events import NodeJoined, ReportCame, Tick
from torch_watchdog.job.job import Job
from torch_watchdog.knowledge import xid_codes
from torch_watchdog.rules.engine import Engine
from torch_watchdog_proto.messages import NodeHello, NodeReport, StepBlock, StepTable, TensorColumns

PER_NODE = 8
STEPS = 80  # the windows are full after 64


def block(rank: int, step: int, rng: random.Random) -> StepBlock:
    def tensor(key: str, high: float, ignored: int) -> TensorColumns:
        return TensorColumns(
            key=key, dtype="int64", rows=(0,), low=(0.0,), high=(high,), negatives=(ignored,), ignored=(ignored,), finite=(True,), shapes=((8, 4096),),
            bound_low=0.0, bound_high=32000.0,
        )  # fmt: skip

    own_ns = int(rng.uniform(0.7e9, 0.8e9))
    return StepBlock(
        rank=rank, attempt=0, pid=rank + 1, first_record=step, micro_step=(0,), micro_of_step=(step,), micro_time_ns=(step,), loader_ns=(2_000_000,),
        loss=(rng.uniform(2, 3),), loss_known=(True,), evaluation=(False,), forward_ns=(own_ns,), scale=(0.0,), step=(step,), step_time_ns=(step,),
        step_ns=(10**9,), vetoed=(False,), allocated_bytes=(40 << 30,), reserved_bytes=(50 << 30,), peak_bytes=(60 << 30,), updates_applied=(step,),
        backward_ns=(10**9 - own_ns,), grad_norm=(rng.uniform(0.5, 1.5),), alloc_retries=(0,),
        tensors=(tensor("input_ids", 31000, 0), tensor("labels", 31000, 900), tensor("attention_mask", 1, 0)),
    )  # fmt: skip


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report("engine alone", engine_seconds(ranks))
    report("whole job", job_seconds(ranks))
    print(
        f"{ranks} ranks; peak memory {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:.0f} MiB more than at the start, blocks included"
    )


def report(what: str, seconds: list[float]) -> None:
    full = seconds[64:]
    print(f"{what}: {statistics.mean(full):.3f} CPU s per second of training (at most {max(full):.3f} in one)")


def engine_seconds(ranks: int) -> list[float]:
    engine, rng, spent = Engine(codes=xid_codes(), changes={}), random.Random(0), []
    for step in range(STEPS):
        tables = [StepTable.of([block(rank, step, rng) for rank in range(first, first + PER_NODE)]) for first in range(0, ranks, PER_NODE)]
        begun = time.process_time()
        for table in tables:
            engine.take_steps(table, float(step))
        found = engine.judge(step + 1.0)
        spent.append(time.process_time() - begun)
        assert not found, found[0]
    return spent


def job_seconds(ranks: int) -> list[float]:
    def hello(node: str) -> NodeHello:
        return NodeHello(job="bench", node=node, version="", policy="observe", command=(), run_dir="", session="s", nodes=ranks // PER_NODE)

    job, rng, spent = Job(hello("0"), started_s=0.0, codes=xid_codes()), random.Random(0), []
    for node in range(ranks // PER_NODE):
        job.handle(NodeJoined(hello=hello(str(node))), now=0.0)
    for step in range(STEPS):
        reports = [
            NodeReport(seq=step + 1, time_ns=step, steps=StepTable.of([block(rank, step, rng) for rank in range(first, first + PER_NODE)]))
            for first in range(0, ranks, PER_NODE)
        ]
        begun = time.process_time()
        for number, one in enumerate(reports):
            job.handle(ReportCame(node=str(number), report=one), now=step + number / len(reports))
        job.handle(Tick(), now=step + 1.0)
        spent.append(time.process_time() - begun)
    return spent


if __name__ == "__main__":
    main()
