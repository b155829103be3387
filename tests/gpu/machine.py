"""On what a result was measured."""

from __future__ import annotations

import datetime
import platform
import subprocess
from typing import Any

__all__ = ["machine"]


def machine() -> dict[str, Any]:
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.date.today().isoformat(),
        "card": card,
        "cards": torch.cuda.device_count(),
        "driver": _driver() if card else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return found[0] if found else None
