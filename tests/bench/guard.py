"""What the guard costs the training thread per batch, in microseconds: `python tests/bench/guard.py`, one JSON line.

The batch is [8, 4096] int64 token ids and labels of a causal model, learned first; the rest is the steady state.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from torch_watchdog_agent.contract import Guard

ROUNDS = 2000
SHAPE = (8, 4096)
WORDS = 50257


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 2), nn.Linear(2, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(self.head(self.table(input_ids)).flatten(0, 1), shifted.flatten())


def batch(leaves: int) -> dict[str, torch.Tensor]:
    made = {"input_ids": torch.randint(0, WORDS, SHAPE), "labels": torch.randint(0, 16, SHAPE)}
    made["labels"][:, ::3] = -100
    extra = {f"extra_{n}": torch.randint(0, 2, SHAPE) for n in range(leaves - 2)}
    return {**made, **extra}


def spread_us(call: Callable[[], object]) -> dict[str, float]:
    for _ in range(50):
        call()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    return {"median": round(statistics.median(times), 1), "p99": round(statistics.quantiles(times, n=100)[98], 1)}


def cost_us(leaves: int) -> dict[str, dict[str, float]]:
    model, made = Tiny(), batch(leaves)
    guard = Guard(say=print, on_refused=print)
    for _ in range(5):
        checked = guard.fetched(made, indices=None, worker=None)
        guard.handed_over(checked, made)
        model(made["input_ids"], made["labels"]).backward()
        guard.step_ended()
    checked = guard.fetched(made, indices=None, worker=None)
    assert not checked.needs_trace and checked.violation is None, checked

    def whole() -> None:
        seen = guard.fresh(guard.fetched(made, indices=None, worker=None))
        guard.handed_over(seen, made)
        guard.step_ended()

    return {"fetched_us": spread_us(lambda: guard.fetched(made, indices=None, worker=None)), "all_calls_us": spread_us(whole)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"shape": SHAPE, "dtype": "int64", **{f"{leaves}_leaves": cost_us(leaves) for leaves in (2, 4)}}))
