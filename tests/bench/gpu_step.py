"""What the watchdog costs a step on GPUs: `python tests/bench/gpu_step.py --ranks 2 --out FILE.json` on a machine that has them.

Alternates runs with and without `watchdog`, several of each, and reports medians and their ratio. Two models: a GPT-2-small-like one (tens of
milliseconds a step) and one that is bound by its launches (a few milliseconds). The loop does not synchronise with the device but once, at the
end of each timed stretch. `--profile FOLDER` writes what Python spends its time on in each rank.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTHS = {"gpt2-small-like": (768, 12, 8, 512), "launch-bound": (64, 4, 4, 64)}  # width, layers, batch, length
WARM_UP, STRETCH, STRETCHES = 30, 40, 5


def train(name: str) -> None:
    """One rank: prints the median step time of its stretches, in milliseconds."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    width, layers, batch, length = WIDTHS[name]
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True, norm_first=True, dropout=0.0)
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(50257, width),
            "blocks": nn.TransformerEncoder(layer, layers),
            "head": nn.Linear(width, 50257 if width > 64 else 512),
        }
    )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.parts["head"](self.parts["blocks"](self.parts["table"](ids)))
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    net = DistributedDataParallel(Net().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    rows = [
        {"ids": torch.randint(0, 512, (length,)), "labels": torch.randint(0, 512, (length,))}
        for _ in range(batch * (WARM_UP + STRETCH * STRETCHES))
    ]
    times_ms, began = [], 0.0
    for step, one in enumerate(DataLoader(rows, batch_size=batch, pin_memory=True)):
        if step >= WARM_UP and (step - WARM_UP) % STRETCH == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            if step > WARM_UP:
                times_ms.append((now - began) / STRETCH * 1e3)
            began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(one["ids"].cuda(non_blocking=True), one["labels"].cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    times_ms.append((time.perf_counter() - began) / STRETCH * 1e3)
    if dist.get_rank() == 0:
        print(f"MS {statistics.median(times_ms):.4f}", flush=True)
    dist.destroy_process_group()


def measured_ms(name: str, ranks: int, wrapper: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *wrapper,
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            __file__,
            "--train",
            name,
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("MS ")]
    if not lines:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-3000:])
    return float(lines[0].split()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", choices=WIDTHS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.train:
        train(args.train)
        return
    import torch

    results: dict[str, Any] = {
        "command": f"python tests/bench/gpu_step.py --ranks {args.ranks} --rounds {args.rounds}",
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ranks": args.ranks,
    }
    watched = [sys.executable, "-m", "torch_watchdog.cli"]
    for name in WIDTHS:
        pairs = [(measured_ms(name, args.ranks, []), measured_ms(name, args.ranks, watched)) for _ in range(args.rounds)]
        plain, ours = statistics.median(one for one, _ in pairs), statistics.median(other for _, other in pairs)
        results[name] = {"plain_ms": plain, "watched_ms": ours, "ratio": round(ours / plain, 4), "pairs_ms": pairs}
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
