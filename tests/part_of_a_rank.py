"""What a rescuer, a saver and a gate know of their rank: its count, its folder and what it told; no socket, no ring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch_watchdog_agent.checkpoint.position import START, Place
from torch_watchdog_agent.checkpoint.subjects import Subjects, TrainingState
from torch_watchdog_agent.checkpoint.window import WindowState
from torch_watchdog_agent.loop import Loop

__all__ = ["PartOfARank"]


class PartOfARank:
    """Rank 0 of two, after five updates."""

    def __init__(self, folder: Path) -> None:
        self.identity = SimpleNamespace(rank=0, world_size=2)
        self.config = SimpleNamespace(run_dir=str(folder), resume=None, device_gate=False, policy="stop", scan=False, grace_s=300.0)
        self.guarding = False
        self.loop = Loop()
        self.loop.resumed(5)
        empty = TrainingState(models=(), optimizers=(), schedulers=(), scalers=())
        self.subjects = SimpleNamespace(now=lambda: empty, scheduled=int, optimizers=tuple)
        self.history = SimpleNamespace(flush=lambda **_: None, device_words=None)
        self.said: list[str] = []
        self.say = self.said.append
        self.window = WindowState(Subjects(), say=self.say)
        self.place: Callable[..., Place] = lambda **_: START
        self.told: list[Any] = []
        self.heard = threading.Event()

    def tell(self, message: Any) -> bool:
        self.told.append(message)
        self.heard.set()
        return True
