"""What `watch_gradients` adds to a step: `python tests/bench/gradients.py`. A step of AdamW over some layers, and the norm of its gradients, on one thread.

Medians of 31 steps, taken in turn. The norm reads every gradient once, so it grows with the parameters, and the step with the parameters times the batch.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from torch_watchdog_agent.gradients import norm_of

ROUNDS, BATCH = 31, 64
SIZES = ((4, 64), (8, 512), (8, 2048))  # layers, width


def main() -> None:
    torch.set_num_threads(1)
    print("| parameters | tensors | step (batch of 64) | norm of its gradients | more |\n|---|---|---|---|---|")
    for layers, width in SIZES:
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        steps, norms = [], []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randn(BATCH, width)).square().mean().backward()
            optimizer.step()
            done = time.perf_counter()
            norm = norm_of(optimizer)
            norms.append(time.perf_counter() - done)
            steps.append(done - begun)
            assert norm is not None and bool(norm.value > 0)
        step_s, norm_s, tensors = median(steps), median(norms), list(model.parameters())
        count = sum(one.numel() for one in tensors)
        print(f"| {count:,} | {len(tensors)} | {1e3 * step_s:.2f} ms | {1e3 * norm_s:.3f} ms | {100 * norm_s / step_s:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
