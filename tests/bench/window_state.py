"""What keeping the state of an update window costs the training thread, in microseconds: `python tests/bench/window_state.py`, one JSON line."""

from __future__ import annotations

import json
import random
import statistics
import time

import numpy as np
import torch
from torch import nn

from torch_watchdog_agent.checkpoint.rng import RngState
from torch_watchdog_agent.checkpoint.subjects import Subjects
from torch_watchdog_agent.checkpoint.window import WindowState

ROUNDS = 300


def cost_us(call, before=lambda: None) -> float:
    for _ in range(20):
        before(), call()
    times = []
    for _ in range(ROUNDS):
        before()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    return round(statistics.median(times), 1)


def transformer(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.1)) for _ in range(layers)))


def convolutions(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(layers)))


def window_of(model: nn.Module, *, groups: int, device: str) -> WindowState:
    model.to(device)
    subjects = Subjects()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[index::groups]} for index in range(groups)], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = torch.amp.GradScaler(device)
    scaler.scale(torch.ones(1, device=device))
    subjects.model_seen(model)
    subjects.optimizer_seen(optimizer)
    subjects.scheduler_seen(scheduler)
    subjects.scaler_seen(scaler)
    window = WindowState(subjects, say=print)
    window.alive = (optimizer, scheduler, scaler, model)
    return window


def main() -> None:
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = {
        "rng_idle": lambda: None,
        "rng_numpy_used": np.random.rand,
        "rng_all_used": lambda: (np.random.rand(), random.random(), torch.rand(1)),
    }
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "unit": "us",
    }
    result |= {name: cost_us(RngState.capture, before) for name, before in draw.items()}
    kinds = {"transformer_24_layers_2_groups": (transformer(24), 2), "resnet50_like_53_batchnorms": (convolutions(53), 1)}
    for name, (model, groups) in kinds.items():
        window = window_of(model, groups=groups, device=device)
        result[f"{name}_opened"] = cost_us(window.opened)
        result[f"{name}_restore"] = cost_us(window.restore)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
