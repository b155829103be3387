"""The learned contract on disk: `contract/rank-R.json` in the run directory, written anew when it has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_watchdog_agent.contract.table import unmet_bounds

__all__ = ["ContractFile"]


class ContractFile:
    """One rank's. What is in the way of writing it is said; and by rank 0, which of the declared bounds hold for nothing."""

    def __init__(self, run_dir: Path, *, rank: int, say: Callable[[str], None]) -> None:
        self._path, self._say, self._rank = run_dir / "contract" / f"rank-{rank}.json", say, rank
        self._written = ""

    def write(self, contract: Any) -> None:
        text = json.dumps(contract, sort_keys=True)
        if text == self._written:
            return
        self._written = text
        for line in unmet_bounds(contract) if self._rank == 0 else ():
            self._say(line)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.with_suffix(".tmp").write_text(text)
            self._path.with_suffix(".tmp").replace(self._path)
        except OSError as error:
            self._say(f"the learned contract could not be written: {error}")
