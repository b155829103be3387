"""How fast `watchdog scan` looks at a data set of a million short samples: `python tests/bench/scan.py [--samples N] [--workers W]`, one JSON line.

The script that is scanned is this file itself, with --train: tokens in memory, batches of 64, a small model of which the scan runs the first steps only. Two
bad samples are planted, near the two ends; both must be found, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS, LENGTH, ROWS = 30_000, 64, 64


def train(samples: int, workers: int) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Tokens(Dataset):
        """A memory-mapped array of tokens, as most corpora are: a sample is a view of it."""

        def __init__(self) -> None:
            self.tokens = (torch.arange(samples * 8, dtype=torch.int32) * 7919 % WORDS).reshape(samples, 8)
            self.tokens[samples // 100, 3] = self.tokens[samples - 5, 3] = WORDS

        def __len__(self) -> int:
            return samples

        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return list(self.tokens[indices].long().repeat(1, LENGTH // 8))

    torch.set_num_threads(1)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Tokens(), batch_size=ROWS, shuffle=False, num_workers=workers):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def scanned(samples: int, workers: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [str(Path(sys.executable).parent / "watchdog"), "scan", "--json", sys.executable, __file__, "--train"]
        done = subprocess.run(
            [*command, "--samples", str(samples), "--workers", str(workers)], cwd=folder, capture_output=True, text=True, check=False
        )
        whole_s = time.monotonic() - began
    report = json.loads(done.stdout)
    found = [entry["dataset_index"] for entry in report["bad"]]
    assert (done.returncode, report["finished"], found) == (65, True, [samples // 100, samples - 5]), done.stderr
    return {
        "samples": report["samples"], "workers": workers, "whole_s": round(whole_s, 1), "scan_s": report["seconds"],
        "samples_per_s": report["samples_per_s"], "bad": found, "cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.samples, given.workers)
    else:
        print(json.dumps(scanned(given.samples, given.workers)))


if __name__ == "__main__":
    main()
