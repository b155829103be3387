"""What every result says of where it was made, how it is kept, and how a training with our hooks is held against the same one without."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_VERSIONS = ("torch", "grpcio", "protobuf", "numpy", "torch-watchdog")


def about(command: str) -> dict[str, Any]:
    """`command`: what a person types to measure it again."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cores": len(os.sched_getaffinity(0)), "load_before": round(os.getloadavg()[0], 1)},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _VERSIONS}},
    }


def keep(found: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Switch:
    """The hooks of this process: on as in any watched launch, or as if no launch of ours watched it."""

    def __init__(self) -> None:
        from torch_watchdog_agent.hooks import active

        self.active, self._config = active, active._config

    def turn(self, *, on: bool) -> None:
        self.active._config = self._config if on else None


def compared(on_ms: list[float], off_ms: list[float]) -> dict[str, Any]:
    """Times of a step in blocks that alternate: the median of their ratios, with its 95 % interval (bootstrap)."""
    ratios = [on / off for on, off in zip(on_ms, off_ms, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return {
        "off_ms": round(statistics.median(off_ms), 3),
        "on_ms": round(statistics.median(on_ms), 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_95": [round(medians[100], 4), round(medians[-101], 4)],
        "rounds": len(ratios),
        "us_a_step": round(statistics.median(on - off for on, off in zip(on_ms, off_ms, strict=True)) * 1e3, 1),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
