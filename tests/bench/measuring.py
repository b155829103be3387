"""What every result says of where it was made, and how it is kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
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


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
