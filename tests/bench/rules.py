"""How many ranks the rules judge on one core: `python tests/bench/rules.py [RANKS]`. One step a second of each, reported by nodes of 8 ranks.

Prints CPU seconds per second of training, for the engine alone and for the whole Job that a daemon runs, and the memory that they take.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from simulated_nodes import usual_block

from torch_watchdog.job.events import NodeJoined, ReportCame, Tick
from torch_watchdog.job.job import Job
from torch_watchdog.knowledge import xid_codes
from torch_watchdog.rules.engine import Engine
from torch_watchdog_proto.messages import NodeHello, NodeReport, StepBlock, StepTable

PER_NODE = 8
STEPS = 80  # the windows are full after 64


def block(rank: int, step: int, rng: random.Random) -> StepBlock:
    own_ns = int(rng.uniform(0.7e9, 0.8e9))
    return replace(
        usual_block(rank, rows=1), first_record=step, micro_of_step=(step,), step=(step,), updates_applied=(step,), loss=(rng.uniform(2, 3),),
        grad_norm=(rng.uniform(0.5, 1.5),), forward_ns=(own_ns,), backward_ns=(10**9 - own_ns,), gpu="",
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
