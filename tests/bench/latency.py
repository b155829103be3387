"""How long a bad batch is held: from its hand-over until every rank has promised and the decision stands, by the clock of the loop that waits for it.

    python tests/bench/latency.py --ranks 2 4 --orders 100 --out latency.json

Real launches with torchrun on gloo under `--policy skip`. The last rank meets a bad token every 110 steps (ten of a thousand may be skipped); its loop
times the fetch of that batch, and of the clean ones. With RANK set this file is the training.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EVERY, BATCH, VOCABULARY = 110, 4, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--orders", type=int, default=100)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    measured = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "load_before": os.getloadavg()[0]},
        "versions": versions(),
        "hold": [measure(ranks, given.orders) for ranks in given.ranks],
    }
    text = json.dumps(measured, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


def versions() -> dict[str, str]:
    import torch

    from torch_watchdog_proto import __version__

    return {"python": platform.python_version(), "torch": torch.__version__, "torch_watchdog": __version__}


def measure(ranks: int, orders: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(sys.executable).parent
        launch = [str(here / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), __file__]
        told = subprocess.run(
            [str(here / "watchdog"), "--policy", "skip", "--dir", folder, "--job", "job", *launch],
            env={**os.environ, "OMP_NUM_THREADS": "1", "LATENCY_ORDERS": str(orders), "LATENCY_OUT": f"{folder}/times.json"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        times = json.loads(Path(folder, "times.json").read_text())
        events = [json.loads(line) for line in Path(folder, "job", "events.jsonl").read_text().splitlines()]
    closed = [event for event in events if event["kind"] == "order.closed"]
    assert len(closed) == len(times["bad"]) == orders and all(event["outcome"] == "done" for event in closed), "an order was given up"
    held = sorted(1000 * seconds for seconds in times["bad"])
    return {
        "ranks": ranks,
        "orders": orders,
        "median_ms": round(statistics.median(held), 2),
        "p99_ms": round(held[min(len(held) - 1, int(0.99 * len(held)))], 2),
        "most_ms": round(held[-1], 2),
        "fetch_of_a_clean_batch_median_ms": round(1000 * statistics.median(times["clean"]), 3),
        "step_median_ms": round(1000 * statistics.median(times["steps"]), 3),
    }


def train() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    orders = int(os.environ["LATENCY_ORDERS"])
    steps = EVERY * (orders + 1)
    tokens = torch.randint(0, VOCABULARY, (steps * BATCH * world, 4))
    bad = set(range(EVERY, EVERY * orders + 1, EVERY))
    for step in bad:
        tokens[step * BATCH * world + world - 1, 2] = VOCABULARY + 9  # the last rank's first sample of that step
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Flatten(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(tokens)
    batches = iter(DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False)))
    times: dict[str, list[float]] = {"bad": [], "clean": [], "steps": []}
    for step in range(steps):
        begun = time.perf_counter()
        (batch,) = next(batches)
        fetched = time.perf_counter()
        times["bad" if step in bad else "clean"].append(fetched - begun)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times["steps"].append(time.perf_counter() - fetched)
    if rank == world - 1:
        Path(os.environ["LATENCY_OUT"]).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end first


if __name__ == "__main__":
    train() if "RANK" in os.environ else main()
