"""Which run a recorded batch comes from, and what was said of it there: by the run directory that it lies in.

What cannot be read there is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_watchdog.phrases import who

__all__ = ["batch_of", "recorded_for", "run_of"]


def run_of(bundle: Path) -> Path:
    """The run directory that the bundle lies in; one that was carried off alone has its replays beside it."""
    run = bundle.absolute().parent.parent
    return run if (run / "job.json").exists() else bundle.absolute().parent


def recorded_for(bundle: Path) -> list[Mapping[str, Any]]:
    """The incidents that it was written for."""
    found = []
    for path in sorted(run_of(bundle).glob("incidents/*/incident.json")):
        try:
            incident = json.loads(path.read_text(encoding="utf-8"))
            if (incident["evidence"] or {}).get("bundle") == f"{bundle.absolute().parent.name}/{bundle.name}":
                found.append(incident)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def batch_of(bundle: Path) -> str:
    """Whose batch it was, as far as that is known: rank, step and sample; "" where nothing is."""
    told = [who(incident) for incident in recorded_for(bundle)]
    return max(told, key=len, default="")
