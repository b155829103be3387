"""What the loader's hooks cost per batch besides the guard, in microseconds: `python tests/bench/hooks.py`, one JSON line.

A loader whose batches cost nothing is iterated with the hooks in place, nothing looked at or recorded, and without them; the best rounds are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

BATCHES, ROUNDS = 2000, 15


def us_per_batch() -> float:
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    batch = {"ids": torch.zeros(8, dtype=torch.int64), "labels": torch.zeros(8, dtype=torch.int64)}
    loader = DataLoader([batch] * BATCHES, batch_size=None, sampler=range(BATCHES), collate_fn=lambda made: made)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in loader:
            pass
        times.append((time.perf_counter_ns() - began) / 1000 / BATCHES)
    return min(times)  # what else runs on the machine only adds


class Nothing:
    """Stands for everything behind the hooks."""

    scan = None
    tracing = False

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __call__(self, *_: object, **__: object) -> None:
        return None

    def handed(self, batch: object, *_: object, **__: object) -> object:
        return batch

    def fetched(self, *_: object, **__: object) -> Nothing:
        return self


def hooked() -> None:
    import torch.utils.data.dataloader

    from torch_watchdog_agent.hooks import active, loader

    active._rank = Nothing()  # type: ignore[assignment]
    active._config = Nothing()  # type: ignore[assignment]
    loader.patch(torch.utils.data.dataloader)


def measured(kind: str) -> float:
    done = subprocess.run(
        [sys.executable, __file__, kind], capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return float(done.stdout)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        if sys.argv[1] == "hooked":
            hooked()
        print(us_per_batch())
    else:
        pairs = [(measured("plain"), measured("hooked")) for _ in range(5)]
        plain, with_hooks = (min(column) for column in zip(*pairs, strict=True))
        print(json.dumps({"plain_us": round(plain, 2), "hooked_us": round(with_hooks, 2), "cost_us": round(with_hooks - plain, 2)}))
