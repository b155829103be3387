"""What the watchdog costs the training thread per step, part by part, in microseconds; prints one JSON line.

    watchdog --dir /tmp/runs python tests/bench/step.py      (plain `python tests/bench/step.py` gives the loop's own share)
    python tests/bench/step.py --guard                       the guard alone, called as the hooks call it: the least noise for a comparison

The batch is [8, 4096] int64 token ids and labels; the model is so small that next() and step() are mostly ours. Parts are nested: next_us holds
those of the hand-over, step_us those of the gate.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from guard import Tiny, batch
from torch.utils.data import DataLoader, IterableDataset

from torch_watchdog_agent.contract import Guard

WARM, ROUNDS = 60, 400
PARTS = {
    "guard": ("fetched", "fresh", "handed_over", "step_ended"),
    "history": ("batch", "flush", "step_done", "loss_seen"),
    "window": ("opened",),
    "gate": ("boundary", "judge"),
}


class Same(IterableDataset):
    """One batch, again and again, so that making it costs nothing."""

    def __init__(self) -> None:
        self.made = batch(2)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield self.made


def timed(times: dict[str, list[float]], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return call(*args, **kwargs)
        finally:
            times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000)

    return measured


def watch_parts(times: dict[str, list[float]]) -> None:
    """Times the parts of this process's rank, where there is one."""
    from torch_watchdog_agent.hooks.active import rank

    here = rank()
    for owner, names in PARTS.items() if here is not None else ():
        part = getattr(here, owner)
        for name in names:
            setattr(part, name, timed(times, f"{owner}.{name}", getattr(part, name)))


def main() -> None:
    torch.set_num_threads(1)
    model, times = Tiny(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = iter(DataLoader(Same(), batch_size=None))
    fetch, step = timed(times, "next", lambda: next(batches)), timed(times, "step", optimizer.step)
    parts: dict[str, list[float]] = {}
    for number in range(WARM + ROUNDS):
        if number == WARM // 2:
            watch_parts(parts)
        if number == WARM:
            times.clear()
            parts.clear()
        made = fetch()
        model(made["input_ids"], made["labels"]).backward()
        step()
        optimizer.zero_grad()
    print(json.dumps({"unit": "us", "rounds": ROUNDS, **{name: figures(found) for name, found in (times | parts).items()}}))


def guard_alone() -> None:
    torch.set_num_threads(1)
    model, made, times = Tiny(), batch(2), {}
    optimizer, guard = torch.optim.SGD(model.parameters(), lr=1e-6), Guard(say=print, on_refused=print)
    fetched = timed(times, "guard.fetched", guard.fetched)
    for number in range(WARM + ROUNDS):
        if number == WARM:
            times.clear()
        guard.handed_over(fetched(made, indices=None, worker=None), made)
        model(made["input_ids"], made["labels"]).backward()
        guard.step_ended()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"unit": "us", "rounds": ROUNDS, **{name: figures(found) for name, found in times.items()}}))


def figures(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    quiet = ordered[len(ordered) // 10]  # what it costs when nobody else wants the core
    return {
        "p10": round(quiet, 1),
        "median": round(statistics.median(ordered), 1),
        "p99": round(ordered[int(len(ordered) * 0.99)], 1),
        "calls": len(ordered),
    }


if __name__ == "__main__":
    guard_alone() if "--guard" in sys.argv[1:] else main()
